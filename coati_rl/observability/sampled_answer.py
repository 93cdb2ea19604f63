"""Read one sampled answer every N steps from the file of rollouts, to be shown while a run goes on.

The coordinator writes a step's rollouts before it sends its record, so the driver finds them there; a step costs it one
look at the file's size, and every N steps one line.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati_rl.observability.step_files import step_file
from coati_rl.text import printable, shown_ends

_MAX_LINE_BYTES = 2**22  # of a longer line there is no answer to show
_MAX_TEXT = 4000  # characters of prompt and answer in charts


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledAnswer:
    """One answer of a policy, as the rollouts have it: unescaped."""

    step: int
    prompt: str
    answer: str
    truth: str
    reward: float | None  # None: not scored
    verdict: str

    @property
    def title(self) -> str:
        """Return what is said of it: the step, the reward, the verdict."""
        reward = "not scored" if self.reward is None else f"reward {self.reward:g}"
        return f"answer of step {self.step}: {reward}, {shown_ends(self.verdict, 40)}"

    def fields(self) -> dict[str, str | int | float | None]:
        """Return a row of a table, texts escaped and shortened."""
        texts = {"prompt": self.prompt, "answer": self.answer, "ground truth": self.truth}
        shown = {name: _shown(text) for name, text in texts.items()}
        return {"step": self.step, **shown, "reward": self.reward, "verdict": _shown(self.verdict)}


class AnswerReader:
    """Read the answers that are due; nothing fails where there is none."""

    def __init__(self, directory: Path | None, *, every: int | None, first_step: int = 0) -> None:
        """Take where a run writes rollouts.

        Args:
            directory: of rollouts; None: of a job on a dataset, which has none.
            every: steps; the first step's is due, too. None: none is.
            first_step: that the run goes on after.
        """
        self._directory, self._every = directory, every
        self._first = first_step + 1
        self._path: Path | None = None
        self._end = 0  # of the file, after the last step
        if directory is not None:
            self._path = step_file(directory, self._first)
            self._end = _size(self._path)

    def take(self, step: int) -> SampledAnswer | None:
        """Return an answer of a step whose record has come, from the middle of what was written since the last."""
        if self._directory is None or self._every is None:
            return None
        path = step_file(self._directory, step)
        begin, self._path, self._end = self._end if path == self._path else 0, path, _size(path)
        if (step != self._first and step % self._every) or self._end <= begin:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError):  # it is for looking at
            return _answer(json.loads(_line_of(path, begin, self._end)))
        return None


def _line_of(path: Path, begin: int, end: int) -> bytes:
    """Return the line after the middle of a part of a file, or the part's first one. Raises: ValueError."""
    with path.open("rb") as file:
        file.seek((begin + end) // 2)
        file.readline(_MAX_LINE_BYTES)
        if file.tell() >= end:
            file.seek(begin)
        line = file.readline(_MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise ValueError("the line is too long")
    return line


def _answer(line: dict[str, Any]) -> SampledAnswer:
    return SampledAnswer(
        step=line["step"],
        prompt=line["prompt"],
        answer=line["response"],
        truth=line["gt_answer"],
        reward=line["reward"],
        verdict=line["verdict"],
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _shown(text: str) -> str:
    left = len(text) - _MAX_TEXT
    return printable(text[:_MAX_TEXT]) + (f" ... {left} more characters" if left > 0 else "")
