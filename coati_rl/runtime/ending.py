"""Say how a run that has ended can be resumed: in the driver, and in its guardian when the driver could not.

The driver notes in its scratch directory where the run writes; whoever has the last word reads it there.
"""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati_rl.data.checkpoint_dir import newest_complete, step_of
from coati_rl.errors import ConfigError

GRACE_S = 15.0  # between the signal that ends a run and SIGKILL, until the run's own --interrupt-grace-s is known
_NOTE = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNote:
    """What is known of a run from outside."""

    run_dir: Path | None = None  # None: it did not come that far
    checkpoints: Path | None = None
    grace_s: float = GRACE_S

    def how_to_resume(self) -> str:
        """Half a sentence for the last line of a run; empty if nothing had begun."""
        if self.run_dir is None or self.checkpoints is None:
            return ""
        newest = newest_complete(self.checkpoints)
        if newest is None:
            return "; no checkpoint was written: start it again"
        # A run goes on in its own directory only if it is resumed from the checkpoints there.
        source = self.run_dir if newest.parent == self.run_dir / "checkpoints" else self.checkpoints
        config = self.run_dir / "config.yaml"
        command = shlex.join(["python", "rl_example.py", "--config", str(config), "-cp", str(source)])
        return f"; go on from step {step_of(newest)} with: {command}"


def note_run(scratch: Path, *, run_dir: Path, checkpoints: Path, grace_s: float) -> None:
    """Leave a note of a run that begins. Raises: ConfigError if the disk refuses."""
    note = {"run_dir": str(run_dir), "checkpoints": str(checkpoints), "grace_s": grace_s}
    try:
        (scratch / _NOTE).write_text(json.dumps(note), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{error.filename or scratch}: cannot be written: {error.strerror}; free space there, or set TMPDIR to "
            "another directory for temporary files"
        ) from error


def read_note(scratch: Path) -> RunNote:
    """The note of `note_run`; the defaults where there is none."""
    try:
        note: dict[str, Any] = json.loads((scratch / _NOTE).read_text(encoding="utf-8"))
        return RunNote(run_dir=Path(note["run_dir"]), checkpoints=Path(note["checkpoints"]), grace_s=note["grace_s"])
    except (OSError, ValueError, KeyError):
        return RunNote()


def say(text: str) -> None:
    """Write lines to stderr; a terminal that is gone, or a full disk behind it, is no reason to fail."""
    try:
        sys.stderr.write("".join(f"rl_example.py: {line}\n" for line in text.splitlines()))
        sys.stderr.flush()
    except OSError:
        return
