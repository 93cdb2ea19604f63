"""Say how a run that has ended can be resumed: in the driver, and in its guardian when the driver could not.

The driver notes in its scratch directory where the run writes; whoever has the last word reads it there.
"""

import json
import os
import shlex
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coati_rl.checkpoint.directory import newest_complete, step_of
from coati_rl.disk import disk_problem
from coati_rl.errors import ConfigError

GRACE_S = 15.0  # between the signal that ends a run and SIGKILL, until the run's own --interrupt-grace-s is known
_NOTE = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNote:
    """Describe a run to whoever has its last word."""

    run_dir: Path | None = None  # None: it did not come that far
    checkpoints: Path | None = None
    resumed_from: Path | None = None
    grace_s: float = GRACE_S

    def how_to_resume(self) -> str:
        """Say how to go on, as half a sentence for the last line of a run; nothing if it had not begun."""
        if self.run_dir is None:
            return ""
        newest = self._newest()
        if newest is None:
            return "; no checkpoint was written: start it again"
        return f"; go on from step {step_of(newest)} with: {self._command(newest)}"

    def how_to_train_on(self) -> str:
        """Say the same of a run that is done."""
        newest = self._newest()
        command = f": {self._command(newest)}" if newest else ""
        return f"; to train on, raise --num-episodes or --max-steps{command}"

    def _newest(self) -> Path | None:
        return (newest_complete(self.checkpoints) if self.checkpoints else None) or self.resumed_from

    def _command(self, newest: Path) -> str:
        run_dir, source = self.run_dir or Path(), newest
        if newest.parent == run_dir / "checkpoints":
            source = run_dir  # in which the run goes on
        elif newest.parent == self.checkpoints:
            source = newest.parent
        return shlex.join(["python", "rl_example.py", "--config", str(run_dir / "config.yaml"), "-cp", str(source)])


def write_note(scratch: Path, note: RunNote) -> None:
    """Leave a note of a run that begins. Raises: ConfigError if the disk refuses."""
    try:
        (scratch / _NOTE).write_text(json.dumps(asdict(note), default=str), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{disk_problem(scratch / _NOTE, error)}, or set TMPDIR to another directory for temporary files"
        ) from error


def read_note(scratch: Path) -> RunNote:
    """Read the note of `write_note`; the defaults where there is none."""
    try:
        note: dict[str, Any] = json.loads((scratch / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return RunNote()
    paths = {name: Path(value) for name, value in note.items() if isinstance(value, str)}
    return RunNote(**paths, grace_s=float(note["grace_s"]))


def say(text: str) -> None:
    """Write lines to stderr; a terminal that is gone, or a full disk behind it, is no reason to fail."""
    with suppress(OSError):
        sys.stderr.write("".join(f"rl_example.py: {line}\n" for line in text.splitlines()))
        sys.stderr.flush()


def give_up_output() -> None:
    """Have the interpreter's last flush succeed where nobody takes the output: it would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
