"""Run a training command in a child process with a deadline, as a user would start it, and return its last lines."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coati_rl.errors import ConfigError, RunError
from coati_rl.runtime.stand_in_nodes import StandInNodes

SLOW = " (--limit-s gives a slow machine more time)"  # after a deadline that has passed
_GRACE_S = 20.0  # between the signal that ends a command and SIGKILL


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandRun:
    """Run `coati-rl JOB --config FILE` with its output in a file."""

    job: str
    config: Path
    log: Path
    names: Mapping[str, str]  # path of the rehearsal -> what the user calls it, for messages
    temporary: str  # directory for temporary files: short, as sockets are in it
    nodes: StandInNodes | None = None  # that it joins

    def run(self, *more: str, timeout_s: float) -> None:
        """Run it to its end.

        Args:
            more: flags after those of the file.
            timeout_s: past it the command is ended, seconds.
        Raises: ConfigError or RunError with the command's own message, as its exit code says.
        """
        command = [sys.executable, "-m", "coati_rl.command_line", self.job, "--config", str(self.config), *more]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": self.temporary}
        if self.nodes is not None:
            command += ["--master_address", self.nodes.address]
            environment |= self.nodes.environment
        environment.setdefault("OMP_NUM_THREADS", "1")
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
            )
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise RunError(
                    f"did not end within {timeout_s:.0f} s{SLOW}; its last line: {self._last_line()}"
                ) from None
            finally:
                _end(process)
        if code:
            raise (ConfigError if code == 2 else RunError)(self.message())

    def lines(self) -> list[str]:
        """Return the output so far, with the user's names of files."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        for path, name in self.names.items():
            text = text.replace(path, name)
        return text.splitlines()

    def _last_line(self) -> str:
        return next((line for line in reversed(self.lines()) if line.strip()), "it has said nothing")

    def message(self) -> str:
        """Return the lines of its error: those that begin as the last one does with the program's name."""
        lines = [line for line in self.lines() if line.strip()]
        prog = lines[-1].partition(": ")[0] + ": " if lines else ""
        message: list[str] = []
        for line in reversed(lines):
            if not line.startswith(prog) or line.startswith(f"{prog}warning: "):
                break
            message.insert(0, line.removeprefix(prog))
        return _without_resume("\n".join(message)) or self._last_line()


def _without_resume(text: str) -> str:
    """Leave out how to resume a run whose files are removed, and where its logs were."""
    for begin in ("; resume from step", "; no checkpoint was written: start it again", " (logs: "):
        text = text.partition(begin)[0]
    return text.removeprefix("the run failed: ")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command; its own parent process ends all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
