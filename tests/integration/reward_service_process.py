"""Start `python -m rewards serve` as a process with flags, and read its address."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.ended import has_ended

REPOSITORY = Path(__file__).parents[2]
TOKEN = "a-token-of-the-tests"
# An address of this machine that no other run of the tests has, so that a port that was free stays so.
HOST = "127." + ".".join(str(os.getpid() >> shift & 255) for shift in (16, 8, 0))
SOURCE = """
import time
def score(response, ground_truth):
    time.sleep(600 if response == "sleep" else 0)
    return float(response == ground_truth)
"""
GRACE_S = 1.0  # instead of 5 s for requests in flight at the end
_BODY = f"""
import sys
from rewards.__main__ import main
from rewards.commands import serve_command
serve_command._GRACE_S = {GRACE_S}
sys.exit(main())
"""


class ServiceProcess:
    """Runs until `end` or `kill`; as a context until its end."""

    def __init__(self, *flags: str, reward_type: str, host: str = HOST, port: int = 0) -> None:
        command = [sys.executable, "-c", _BODY, "serve", "--type", reward_type, "--host", host, "--port", str(port)]
        self.process = subprocess.Popen(
            [*command, "--num-workers", "1", *flags],
            cwd=REPOSITORY,
            env={**os.environ, "COATI_REWARD_TOKEN": TOKEN},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.lines: list[str] = []  # of stderr, up to the one with the address
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r" on (http://\S+)", line):
                self.url = found[1]
                break
        else:
            raise AssertionError(f"no service: {''.join(self.lines)}")
        self.address = (host, urlsplit(self.url).port or 0)

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def __enter__(self) -> "ServiceProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=60)

    def request(
        self, method: str, path: str, body: Any = None, *, token: str | None = TOKEN, timeout_s: float = 60.0
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers in lower case, and the parsed body; `body` is bytes, or is sent as JSON."""
        connection = http.client.HTTPConnection(*self.address, timeout=timeout_s)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, content, headers)
            reply = connection.getresponse()
            return reply.status, {key.lower(): value for key, value in reply.getheaders()}, json.loads(reply.read())
        finally:
            connection.close()

    def health(self) -> dict[str, Any]:
        """Return the reply of GET /health."""
        return self.request("GET", "/health", token=None)[2]


def own_reward(directory: Path) -> str:
    """The type of a reward that compares texts; "sleep" takes it for ever."""
    (directory / "own.py").write_text(SOURCE)
    return f"{directory}/own.py:score"


def wait_until(claim: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for something that must come true."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def all_gone(processes: list[psutil.Process]) -> bool:
    """True when none of them runs any more."""
    return all(has_ended(process) for process in processes)
