"""Execute the commands of README.md and docs/ and compare what they print: scripts/check-docs [PAGE.md ...] [--list].

The fenced blocks of a page are read in order, in a temporary directory of the page's own from which the repository is
seen as if it were a clone:

- `console`: a line "$ command" is run by bash with pipefail ("> " continues it); the lines after it are what stdout and
  stderr hold together. "..." stands for any text within a line, and on a line of its own for any lines. A last
  line "[2]" is the exit status, else it must be 0. Every command starts in the page's directory.
- any language with title="FILE": the block is written to FILE, for the commands after it.
- `bash`: commands that are not run. The line before the block says why: <!-- not run: REASON -->.

Exit status: 0 if every command printed what its page says, 1 otherwise.
"""

import argparse
import contextlib
import difflib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300.0  # for one command
NOT_SHOWN = {".git", ".venv", ".venv-gpu", ".cache", "runs", "site"}  # of the repository, in a page's directory
FENCE = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>[^>]+?) -->\n)?^(?P<ticks>```+)(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=ticks) *$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int  # of its first line of text, from 1
    language: str
    title: str | None  # the file it is written to
    reason: str | None  # why its commands are not run
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of a `console` block, with what it should print."""

    line: int
    text: str
    expected: str
    status: int


def pages() -> list[Path]:
    """Return the README and the pages of docs/, without the decisions, which are history."""
    written = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(page for page in written if page.parent.name != "decisions")]


def blocks(page: Path) -> Iterator[Block]:
    """Read the fenced blocks of a page, in order."""
    content = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(content):
        language, _, rest = match["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        yield Block(
            page=page,
            line=content.count("\n", 0, match.start("text")) + 1,
            language=language,
            title=title[1] if title else None,
            reason=match["reason"],
            text=match["text"],
        )


def commands(block: Block) -> Iterator[Command]:
    """Read the commands of a `console` block. Raises: ValueError for a block that does not begin with one."""
    lines = block.text.splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("$ ")]
    if not starts or starts[0] != 0:
        raise ValueError(f"{block.page.name}:{block.line}: a console block begins with a line '$ command'")
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        text, rest = [lines[start][2:]], lines[start + 1 : end]
        while rest and rest[0].startswith("> "):
            text.append(rest.pop(0)[2:])
        status = int(rest.pop()[1:-1]) if rest and re.fullmatch(r"\[\d+\]", rest[-1]) else 0
        yield Command(line=block.line + start, text="\n".join(text), expected="\n".join(rest), status=status)


def matches(expected: str, printed: str) -> bool:
    """Tell whether `printed` is what a page says, "..." standing for anything."""
    pattern = ""
    for line in expected.rstrip().splitlines():
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*"
        else:
            pattern += r"[^\n]*".join(re.escape(part) for part in line.rstrip().split("...")) + r"\n"
    return re.fullmatch(pattern, _normalised(printed)) is not None


def _normalised(printed: str) -> str:
    """One newline at the end of each line, no spaces before it; of a line that was overwritten what stands last."""
    lines = [line.rstrip().rpartition("\r")[2] for line in printed.rstrip().split("\n")]
    return "\n".join(lines) + "\n" if printed.strip() else ""


def run(command: Command, folder: Path) -> tuple[str, int]:
    """Run a command in a page's directory and return (what it printed, its exit status)."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command.text], cwd=folder, env=environment, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # a run ends its own processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        os.killpg(process.pid, signal.SIGKILL)
        return f"{process.communicate()[0]}\nnot done after {TIMEOUT_S:g} s", -1
    return printed, process.returncode


def make_folder(folder: Path) -> None:
    """Show the repository in `folder` as a clone with an environment: what is written there stays out of it."""
    for entry in ROOT.iterdir():
        if entry.name not in NOT_SHOWN:
            (folder / entry.name).symlink_to(entry)
    (folder / ".venv").symlink_to(sys.prefix)


def check(page: Path) -> int:
    """Execute a page and return how many of its commands did not do what it says."""
    num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="check-docs-") as name:
        folder = Path(name)
        make_folder(folder)
        for block in blocks(page):
            if block.title:
                (folder / block.title).write_text(block.text, encoding="utf-8")
            elif block.language == "console" and block.reason is None:
                num_wrong += sum(not _is_right(command, block, folder) for command in commands(block))
    return num_wrong


def _is_right(command: Command, block: Block, folder: Path) -> bool:
    """Run a command and say how it went."""
    started = time.monotonic()
    printed, status = run(command, folder)
    is_right = status == command.status and matches(command.expected, printed)
    place = f"{block.page.relative_to(ROOT)}:{command.line}"
    first = command.text.partition("\n")[0]
    print(f"{'ok   ' if is_right else 'WRONG'} {time.monotonic() - started:6.1f} s  {place}: {first}", flush=True)
    if not is_right:
        print(f"exit status {status}, expected {command.status}")
        lines = command.expected.splitlines(), _normalised(printed).splitlines()
        print("\n".join(difflib.unified_diff(*lines, "the page", "printed", lineterm="")), flush=True)
    return is_right


def left_out(page: Path) -> Iterator[str]:
    """Name what is not run of a page, and why."""
    for block in blocks(page):
        if block.reason:
            yield f"{page.relative_to(ROOT)}:{block.line}: {block.reason}"


def main() -> int:
    """Run the pages that are named, or all."""
    parser = argparse.ArgumentParser(prog="scripts/check-docs", description=__doc__.partition(":")[0] + ".")
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE.md", help="pages; default: README.md and docs/")
    parser.add_argument("--list", action="store_true", help="only name what is not run, and why")
    arguments = parser.parse_args()
    chosen = [page.resolve() for page in arguments.pages] or pages()
    started = time.monotonic()
    num_wrong = 0 if arguments.list else sum(check(page) for page in chosen)
    print("not run:")
    print("\n".join(f"  {line}" for page in chosen for line in left_out(page)))
    if not arguments.list:
        print(f"{num_wrong} commands are not as documented; {time.monotonic() - started:.0f} s in all")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
