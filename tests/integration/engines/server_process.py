"""Run a server of another program, with its log in a file, until the test ends.

The packages that only servers need are not in the test environment: `scripts/extra_packages.sh` installs them in a
folder beside it, which is on the server's PYTHONPATH alone.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

REPOSITORY = Path(__file__).parents[3]
_READY_S = 240.0


class ServerProcess:
    """One server process on loopback."""

    def __init__(self, port: int, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.url, self._log = f"http://127.0.0.1:{port}", log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
                start_new_session=True,
            )

    def wait_ready(self, path: str) -> None:
        """Wait until a path is answered with status 200."""
        end = time.monotonic() + _READY_S
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the server has ended:\n{self._log.read_text()[-3000:]}"
            try:
                with urlopen(self.url + path, timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"the server is not ready:\n{self._log.read_text()[-3000:]}")

    def stop(self) -> None:
        """Stop all of its processes, without ending them."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def ready(server: ServerProcess, path: str) -> Iterator[ServerProcess]:
    """A server that answers; it is killed at the end, with its processes."""
    try:
        server.wait_ready(path)
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def words(flags: Mapping[str, object]) -> list[str]:
    """The words of a command line: --flag value, and --flag alone where the value is True."""
    return [word for name, value in flags.items() for word in ([name] if value is True else [name, str(value)])]


def packages(name: str) -> str:
    """The folder of the packages of requirements/NAME.in, installed once."""
    command = [str(REPOSITORY / "scripts" / "extra_packages.sh"), sys.executable, name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
