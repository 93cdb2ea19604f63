"""scripts/check_docs.py: what it takes for a command, what it accepts as its output, and what it runs."""

from pathlib import Path

import check_docs
import pytest

PAGE = """\
# A page

```python title="double.py"
import sys
print(2 * int(sys.argv[1]))
```

```console
$ python3 double.py 21
42
$ cat <<END
> one
> END
one
$ echo lost >&2; exit 3
lost
[3]
```

<!-- not run: takes a cluster -->
```bash
sbatch scripts/slurm.sh
```

```text
$ not a command
```
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    return path


def test_a_console_block_is_commands_with_output_and_exit_status(page: Path) -> None:
    _, console, shell, text = check_docs.blocks(page)
    assert [(c.line, c.text, c.expected, c.status) for c in check_docs.commands(console)] == [
        (9, "python3 double.py 21", "42", 0),
        (11, "cat <<END\none\nEND", "one", 0),
        (15, "echo lost >&2; exit 3", "lost", 3),
    ]
    assert (shell.language, shell.reason, shell.line) == ("bash", "takes a cluster", 22)
    assert (text.language, text.reason) == ("text", None)


def test_a_console_block_that_begins_with_output_is_refused(page: Path) -> None:
    page.write_text("```console\n42\n$ echo 42\n```\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"page\.md:2: a console block begins with a line"):
        list(check_docs.commands(next(check_docs.blocks(page))))


@pytest.mark.parametrize(
    ("expected", "printed", "is_match"),
    [
        ("42", "42\n", True),
        ("42", "42  \n\n", True),
        ("42", "421\n", False),
        ("42", "41\n42\n", False),
        ("took ... s", "took 1.5 s\n", True),
        ("took ... s", "took 1.5\nor 2 s\n", False),
        ("...\nlast", "last\n", True),
        ("...\nlast", "first\nsecond\nlast\n", True),
        ("...\nlast", "first\nlast one\n", False),
        ("a.c", "abc\n", False),
        ("", "", True),
        ("", "something\n", False),
        ("100%", " 50%\r100%\n", True),
    ],
)
def test_three_dots_stand_for_anything_and_all_else_for_itself(expected: str, printed: str, is_match: bool) -> None:
    assert check_docs.matches(expected, printed) is is_match


def test_a_page_is_executed_in_a_directory_of_its_own(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_docs.check(page) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ok", "ok", "ok"]
    assert not (page.parent / "double.py").exists()
    assert list(check_docs.left_out(page)) == ["page.md:22: takes a cluster"]


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [("\n42\n", "\n43\n", "-43\n+42\n"), ("[3]", "[4]", "exit status 3, expected 4"), ("[3]\n", "", "expected 0")],
)
def test_another_output_or_exit_status_is_found_and_shown(
    page: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, difference: str
) -> None:
    page.write_text(PAGE.replace(old, new), encoding="utf-8")
    assert check_docs.check(page) == 1
    assert difference in capsys.readouterr().out


def test_a_command_that_does_not_end_is_ended_with_all_its_processes(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_docs, "TIMEOUT_S", 0.5)
    page.write_text("```console\n$ echo begun; sleep 1000 & sleep 1000\nbegun\n```\n", encoding="utf-8")
    assert check_docs.check(page) == 1
    assert "not done after 0.5 s" in capsys.readouterr().out
