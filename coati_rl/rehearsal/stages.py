"""Record the stages of a rehearsal: their seconds and findings, the lines of the terminal, the closing table, JSON."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from coati_rl.errors import CoatiError, ConfigError, RunError
from coati_rl.text import printable, shorten

Outcome = Literal["ok", "warning", "refused", "failed"]
EXIT_CODES: dict[Outcome, int] = {"ok": 0, "warning": 0, "failed": 1, "refused": 2}
_WIDTH = 110  # characters of a finding in the table


@dataclass(kw_only=True, slots=True)
class RehearsalStage:
    """Hold one stage; it is filled while it runs."""

    name: str
    seconds: float = 0.0
    outcome: Outcome = "ok"
    finding: str = ""  # in one line
    warnings: list[str] = field(default_factory=list)
    problem: str = ""  # why the command is refused, or fails: the message as the command would print it

    def warn(self, texts: Sequence[str]) -> None:
        """Note what does not stop the command."""
        if texts:
            self.warnings += texts
            self.outcome = "warning"


class Stages:
    """Run stages one after another, up to the first that fails, within a time for all of them."""

    def __init__(self, limit_s: float, say: Callable[[str], None], *, now: Callable[[], float] = time.monotonic):
        """Take the time for all stages.

        Args:
            limit_s: seconds.
            say: prints a line.
            now: a monotonic clock, in seconds.
        """
        self.stages: list[RehearsalStage] = []
        self._say, self._now = say, now
        self._begin = now()
        self._limit_s = limit_s

    def left_s(self) -> float:
        """Return what is left of the time. Raises: RunError if nothing is."""
        left = self._limit_s - (self._now() - self._begin)
        if left <= 0:
            raise RunError(f"the rehearsal's time is over; raise --limit-s {self._limit_s:g}")
        return left

    @contextmanager
    def stage(self, name: str) -> Iterator[RehearsalStage]:
        """Time a stage, and print its line. Raises: what the block raises, after it was recorded."""
        stage = RehearsalStage(name=name)
        self.stages.append(stage)
        begin = self._now()
        try:
            yield stage
        except CoatiError as error:
            stage.outcome = "refused" if isinstance(error, ConfigError) else "failed"
            stage.problem = str(error)
            raise
        finally:
            stage.seconds = self._now() - begin
            prefix = f"{stage.outcome}: " if stage.problem else ""
            self._say(f"{name:<12}{stage.seconds:6.1f} s  {prefix}{_line(stage)}")
            for warning in stage.warnings:
                self._say(f"{'':<22}warning: {printable(warning)}")

    def exit_code(self) -> int:
        """Return 0 if nothing stops the command, 2 if it would be refused, 1 if it would fail."""
        return max((EXIT_CODES[stage.outcome] for stage in self.stages), default=0)

    def table(self) -> Iterator[str]:
        """Yield the lines of the closing table."""
        yield f"{'stage':<12}{'seconds':>8}  {'outcome':<9}finding"
        for each in self.stages:
            yield f"{each.name:<12}{each.seconds:8.1f}  {each.outcome:<9}{shorten(_line(each), _WIDTH)}"
        yield f"{'total':<12}{self._now() - self._begin:8.1f}"

    def write_json(self, **more: Any) -> None:
        """Write all that was found to standard output, as one object."""
        found = {
            "exit_code": self.exit_code(),
            "seconds": round(self._now() - self._begin, 3),
            "stages": [asdict(stage) for stage in self.stages],
            **more,
        }
        with suppress(OSError):
            sys.stdout.write(json.dumps(found, indent=2) + "\n")
            sys.stdout.flush()


def _line(stage: RehearsalStage) -> str:
    """Return what was found, in one line that a terminal can show."""
    return printable(stage.problem or stage.finding).replace("\n", "; ") or "ok"
