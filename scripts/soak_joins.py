"""Let producers join a run over HTTP on loopback (`--join-port`), leave it, and be killed."""

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

_LEAVES_S = 60.0  # what a leave may take on a machine that is busy


class JoinedProducers:
    """Hold the processes that have joined a run; they are not among the run's own."""

    def __init__(self, model: Path, output: Path, rng: random.Random, *, at_most: int = 2) -> None:
        """Take a free port. `output`: the directory of what they print; `at_most`: so many at a time."""
        output.mkdir(parents=True, exist_ok=True)
        port = _free_port(rng)
        self._address = ("127.0.0.1", port)
        self.flags = ["--join-port", str(port), "--join-host", "127.0.0.1"]
        self.environment = {"COATI_JOIN_TOKEN": secrets.token_hex()}
        join = ["join", f"http://127.0.0.1:{port}", "--model", str(model), "--device", "cpu"]
        self._command = [sys.executable, "-m", "coati_rl.command_line", *join]
        self._output, self._rng, self._at_most, self._number = output, rng, at_most, 0
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}

    def join(self) -> bool:
        """Start one. Returns: False if there are enough, or the run does not listen yet."""
        self._processes = {path: each for path, each in self._processes.items() if each.poll() is None}
        if len(self._processes) >= self._at_most or not self._is_listening():
            return False
        path = self._output / f"joined-{self._number}.out"
        self._number += 1
        with path.open("wb") as file:
            environment = {**os.environ, **self.environment}
            self._processes[path] = subprocess.Popen(
                self._command, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        return True

    def leave(self) -> str | None:
        """Tell one to leave. Returns: what went wrong, empty if nothing did; None if none works for the run."""
        path = self._working()
        if path is None:
            return None
        process = self._processes.pop(path)
        process.terminate()
        try:
            code = process.wait(_LEAVES_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            return f"{path.name} has not left within {_LEAVES_S:.0f} s"
        return "" if code == 0 else f"{path.name} left with exit code {code}: {_last_line(path)}"

    def kill(self) -> bool:
        """Kill one. Returns: False if none works for the run."""
        path = self._working()
        if path is not None:
            _kill(self._processes.pop(path))
        return path is not None

    def end(self) -> None:
        """Kill all: their run has ended."""
        for process in self._processes.values():
            _kill(process)
        self._processes = {}

    def _is_listening(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=1.0):
            return True
        return False

    def _working(self) -> Path | None:
        """Return the output of one that has been admitted."""
        admitted = self.admitted()
        return self._rng.choice(admitted) if admitted else None

    def admitted(self) -> list[Path]:
        """Return the outputs of those that work for the run."""
        return [
            path
            for path, process in self._processes.items()
            if process.poll() is None and b"joined as producer" in path.read_bytes()
        ]


def _free_port(rng: random.Random) -> int:
    """Return a port that no program gets by chance while the run is started again: it is below the ephemeral ones."""
    while True:
        port = rng.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and those it has started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(path: Path) -> str:
    return (path.read_text(errors="replace").splitlines() or [""])[-1]
