"""Print how a run that has ended can be resumed, from the driver, or from the subreaper when the driver was killed.

The driver writes a note of the run's directories into its scratch directory, where both read it.
"""

import json
import os
import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coati_rl.checkpoint.directory import newest_complete, step_of
from coati_rl.disk import disk_problem
from coati_rl.errors import ConfigError

GRACE_S = 15.0  # between the signal that ends a run and SIGKILL, until the run's own --interrupt-grace-s is known
PROG = "rl_example.py"  # in messages, unless another command is run
_NOTE = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNote:
    """Record what the last message of a run needs."""

    run_dir: Path | None = None  # None: it was not created
    checkpoints: Path | None = None
    resumed_from: Path | None = None
    grace_s: float = GRACE_S
    command: str = "python rl_example.py"  # that runs the job, without its flags
    to_train_on: str = "--num-episodes"  # the flag by which a finished run goes on, besides --max-steps

    def how_to_resume(self) -> str:
        """Return the end of a run's last line that says how to resume it; empty if the run had not begun."""
        if self.run_dir is None:
            return ""
        newest = self._newest()
        if newest is None:
            return "; no checkpoint was written: start it again"
        return f"; resume from step {step_of(newest)} with: {self._command(newest)}"

    def how_to_train_on(self) -> str:
        """Return the end of a finished run's last line that says how to train further."""
        newest = self._newest()
        command = f": {self._command(newest)}" if newest else ""
        return f"; to train on, raise {self.to_train_on} or --max-steps{command}"

    def _newest(self) -> Path | None:
        return (newest_complete(self.checkpoints) if self.checkpoints else None) or self.resumed_from

    def _command(self, newest: Path) -> str:
        run_dir, source = self.run_dir or Path(), newest
        if newest.parent == run_dir / "checkpoints":
            source = run_dir  # where the resumed run continues
        elif newest.parent == self.checkpoints:
            source = newest.parent
        return f"{self.command} " + shlex.join(["--config", str(run_dir / "config.yaml"), "-cp", str(source)])


def command_here(command: str) -> str:
    """Return what runs a job from the directory where it was typed, without flags.

    Args:
        command: as documentation has it: "python rl_example.py", "coati-rl sft"; returned as it is where this process
            was started in another way.
    """
    program, name = Path(sys.argv[0]), command.split()[-1].replace(PROG, "rl")
    if program.name == PROG:
        return shlex.join([_python(), str(program.absolute())])
    if program.name == "coati-rl":
        found = shutil.which(program.name)
        return shlex.join([program.name if found and _is_same(found, program) else str(program.absolute()), name])
    if program.parts[-2:] == ("consumer", "__main__.py"):
        return shlex.join([_python(), "-m", program.parent.name, name])
    return command


def _python() -> str:
    """Return the name of this interpreter: the short one if a shell finds it."""
    found = shutil.which("python")
    return "python" if found and _is_same(found, Path(sys.executable)) else sys.executable


def _is_same(found: str, program: Path) -> bool:
    """Compare paths without their links: the interpreters of all environments link to one."""
    return Path(found).absolute() == program.absolute()


def write_note(scratch: Path, note: RunNote) -> None:
    """Write the note of a run that begins. Raises: ConfigError if the file cannot be written."""
    try:
        (scratch / _NOTE).write_text(json.dumps(asdict(note), default=str), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{disk_problem(scratch / _NOTE, error)}, or set TMPDIR to another directory for temporary files"
        ) from error


def read_note(scratch: Path) -> RunNote:
    """Return the note of `write_note`; one with defaults if there is none."""
    try:
        note: dict[str, Any] = json.loads((scratch / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return RunNote()
    names = ("run_dir", "checkpoints", "resumed_from")
    paths = {name: Path(note[name]) for name in names if note.get(name) is not None}
    return RunNote(
        **paths, grace_s=float(note["grace_s"]), command=str(note["command"]), to_train_on=str(note["to_train_on"])
    )


def no_temporary_directory(error: OSError) -> str:
    """Return what is said where no temporary directory can be made."""
    where = f"{error.filename}: " if error.filename else ""
    return f"TMPDIR: {where}{error.strerror}; set it to a directory with free space that you may write to"


def print_lines(text: str, *, prog: str = PROG) -> None:
    """Write lines to stderr, after the program's name; ignore a closed terminal or a full disk."""
    with suppress(OSError):
        sys.stderr.write("".join(f"{prog}: {line}\n" for line in text.splitlines()))
        sys.stderr.flush()


def discard_output() -> None:
    """Redirect closed output streams to /dev/null: a failure of the interpreter's last flush changes the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
