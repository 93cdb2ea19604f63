"""`python -m rewards serve` as a process of its own: flags flow in, an address and the process flow out."""

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

REPOSITORY = Path(__file__).parents[2]
TOKEN = "a-token-of-the-tests"


class ServiceProcess:
    """Runs until `end` or `kill`; as a context until its end."""

    def __init__(self, *flags: str, port: int = 0, reward_type: str = "boxed") -> None:
        command = [sys.executable, "-m", "rewards", "serve", "--type", reward_type, "--port", str(port)]
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
        self.port = urlsplit(self.url).port or 0

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(30)

    def __enter__(self) -> "ServiceProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=30)

    def request(
        self, method: str, path: str, body: Any = None, *, token: str | None = TOKEN, timeout_s: float = 60.0
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers in lower case, and the parsed body; `body` is bytes, or is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, content, headers)
            reply = connection.getresponse()
            return reply.status, {key.lower(): value for key, value in reply.getheaders()}, json.loads(reply.read())
        finally:
            connection.close()

    def health(self) -> dict[str, Any]:
        """What GET /health says."""
        return self.request("GET", "/health", token=None)[2]


def wait_until(claim: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something that must come true."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def all_gone(processes: list[psutil.Process]) -> bool:
    """True when none of them runs any more."""
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
