"""Test that a directory which is written again is there at any moment: as it was, or as it is now."""

import os
import signal
from pathlib import Path

import pytest

from consumer import whole_directory
from consumer.whole_directory import publish


def written(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "weights").write_text(text)
    return path


def killed_at_rename(number: int, partial: Path, directory: Path) -> None:
    """Publish in a child process that is killed before its rename of this number."""
    if child := os.fork():
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        return
    rename, seen = Path.rename, []

    def counting(self: Path, target: Path) -> Path:
        seen.append(target)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.rename = counting  # type: ignore[method-assign]  # in the child alone
    try:
        publish(partial, directory)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("number", [1, 2])
def test_a_kill_while_a_directory_is_replaced_leaves_one_of_both_under_its_name(tmp_path: Path, number: int) -> None:
    directory = written(tmp_path / "latest", "old")
    killed_at_rename(number, written(tmp_path / ".latest.partial", "new"), directory)
    assert (directory / "weights").read_text() in ("old", "new")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_directory_is_replaced_and_nothing_else_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:  # as on NFS
        monkeypatch.setattr(whole_directory, "_RENAME_EXCHANGE", 1 << 30)
    directory = written(tmp_path / "latest", "old")
    for text in ("new", "newer"):
        publish(written(tmp_path / ".latest.partial", text), directory)
        assert (directory / "weights").read_text() == text
    assert os.listdir(tmp_path) == ["latest"]
