"""The trainer's end of the wire, and engines' ends as processes that may be killed."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coati_rl.transport.wire import WeightSender

ROOT = Path(__file__).parents[3]


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    sender = WeightSender()
    yield sender
    sender.close()


@pytest.fixture
def spawn_peer() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts peer.py with these arguments; ended with the test."""
    peers: list[subprocess.Popen[str]] = []

    def spawn(*arguments: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).with_name("peer.py")), *arguments]
        peers.append(
            subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        return peers[-1]

    yield spawn
    for peer in peers:
        peer.kill()
        peer.communicate()
