"""Check the tables of docs/coming_from: rows are counted, and what they name as ours exists."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from coati_rl.config.cli import build_parser, parse
from coati_rl.config.commands import TRAINING
from coati_rl.config.rules import check

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "coming_from"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.name != "README.md")
FLAGS = {
    name for job in TRAINING.values() for action in build_parser(job=job)._actions for name in action.option_strings
}
TOP_LEVEL = {"coati_rl", "producer", "consumer", "rewards", "scripts", "docs", "tests"}
Row = tuple[str, str, str]  # theirs, ours, note


def rows(page: str) -> list[Row]:
    """A cell holds no bar."""
    lines = (FOLDER / f"{page}.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("| ") and not line.startswith("| theirs")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    return [(theirs, ours, note) for theirs, ours, note in cells]


def kind(row: Row) -> str:
    for name in ("not yet", "no, because "):
        if row[1].startswith(name):
            return name.partition(",")[0]
    return "ours"


def snippets(page: str) -> Iterator[str]:
    """What is in backticks of our two columns."""
    for _, ours, note in rows(page):
        yield from re.findall(r"`([^`]+)`", f"{ours} {note}")


def counts(page: str) -> list[int]:
    kinds = [kind(row) for row in rows(page)]
    return [len(kinds), *(kinds.count(name) for name in ("ours", "not yet", "no"))]


def test_the_index_counts_the_rows_of_every_page() -> None:
    told = {
        page: [int(number) for number in numbers.split(" | ")]
        for page, numbers in re.findall(r"^\| \[[^]]+\]\((\w+)\.md\) \| ([\d |]+\d) \|$", INDEX, flags=re.MULTILINE)
    }
    assert told == {page: counts(page) for page in PAGES}
    total = [sum(column) for column in zip(*told.values(), strict=True)]
    assert f"| all | {' | '.join(map(str, total))} |" in INDEX
    assert "Of {} rows, {} are ours, {} not yet and {} no.".format(*total) in INDEX


@pytest.mark.parametrize("page", PAGES)
def test_a_row_names_what_is_ours_or_says_that_there_is_nothing(page: str) -> None:
    assert [row for row in rows(page) if kind(row) == "ours" and "`" not in row[1]] == []
    assert [row[0] for row in rows(page) if row[1].startswith("no") and kind(row) == "ours"] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_flags_of_ours_exist_and_take_the_values_beside_them(page: str) -> None:
    commands = [shlex.split(snippet) for snippet in snippets(page) if snippet.startswith("-")]
    named = {word for command in commands for word in command if re.match(r"--?[A-Za-z]", word)}
    assert named - FLAGS == set()
    for command in commands:
        if len(command) > 1:
            parse(command)


@pytest.mark.parametrize("page", PAGES)
def test_the_files_of_ours_exist(page: str) -> None:
    paths = [snippet for snippet in snippets(page) if snippet.partition("/")[0] in TOP_LEVEL and "/" in snippet]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_flag_of_colossal_rl_is_a_flag_here() -> None:
    theirs = {flag for row in rows("colossal_rl") for flag in re.findall(r"`(--?[A-Za-z][\w-]*)`", row[0])}
    assert len(theirs) > 30
    assert theirs - FLAGS == set()


def test_the_commands_are_accepted() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (FOLDER / "colossal_rl.md").read_text(encoding="utf-8"), re.DOTALL)
    commands = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    assert len(commands) == 2
    for command in commands:
        program, script, *arguments = shlex.split(command)
        assert (program, script) == ("python", "rl_example.py")
        check(parse(arguments)[0])
