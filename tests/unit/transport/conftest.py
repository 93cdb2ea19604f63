"""The trainer's end of the wire, and engines' ends as processes that may be killed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coati_rl.transport.rendezvous import CollectiveBackend
from coati_rl.transport.shm import SHM_DIRECTORY
from coati_rl.transport.wire import WeightSender

ROOT = Path(__file__).parents[3]
PEER = Path(__file__).with_name("peer.py")


@pytest.fixture(params=["gloo", "shm", "file"])
def backend(request: pytest.FixtureRequest) -> CollectiveBackend:
    """Every backend that needs no GPU; a test that asks for a sender runs with each."""
    return request.param


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """For the files of the file backend; nothing may be left there, nor in shared memory, however a test ends."""
    before = set(SHM_DIRECTORY.glob("coati-*"))
    yield tmp_path / "weights"
    end = time.monotonic() + 10.0  # a member may still be cleaning up
    while (left := {*SHM_DIRECTORY.glob("coati-*"), *tmp_path.glob("weights/*")} - before) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


@pytest.fixture
def sender(backend: CollectiveBackend, directory: Path) -> Iterator[WeightSender]:
    sender = WeightSender(backend=backend, directory=directory)
    yield sender
    sender.close()


@pytest.fixture
def spawn_peer(directory: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts peer.py with these arguments, after the Python of `before`; ended with the test."""
    peers: list[subprocess.Popen[str]] = []

    def spawn(*arguments: str, before: str = "") -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        program = f"{before}\nimport runpy\nrunpy.run_path({str(PEER)!r}, run_name='__main__')"
        command = [sys.executable, "-c", program, *arguments]
        peers.append(
            subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        return peers[-1]

    yield spawn
    for peer in peers:
        peer.kill()
        peer.communicate()
