"""Provide the trainer's end of a transfer, and engines' ends as processes that may be killed."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path
from secrets import token_hex

import pytest

from coati_rl.transport import wire
from coati_rl.transport.rendezvous import CollectiveBackend
from coati_rl.transport.shm import SHM_DIRECTORY
from coati_rl.transport.wire import WeightSender
from tests.unit.transport.forked_peer import ForkedPeer

ROOT = Path(__file__).parents[3]
PEER = Path(__file__).with_name("peer.py")
Peer = subprocess.Popen[str] | ForkedPeer


@pytest.fixture(params=["gloo", "shm", "file"])
def backend(request: pytest.FixtureRequest) -> CollectiveBackend:
    """Every backend that needs no GPU; a test that asks for a sender runs with each."""
    return request.param


@pytest.fixture
def group_prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the prefix of the names of this test's shared segments; other programs have segments too."""
    prefix = token_hex(8)
    monkeypatch.setattr(wire, "token_hex", lambda num_bytes: prefix + token_hex(num_bytes))
    return prefix


@pytest.fixture
def directory(tmp_path: Path, group_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For the files of the file backend; nothing may be left there, of rank 0's store, or in shared memory, however a
    test ends.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    get_temp_dir()  # of multiprocessing's sockets, for which the other is too long
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield tmp_path / "weights"
    end = time.monotonic() + 60.0  # a member may still be cleaning up
    places = (SHM_DIRECTORY, f"coati-{group_prefix}*"), (tmp_path, "weights/*"), (temporary, "coati-*")
    while left := [path for parent, pattern in places for path in parent.glob(pattern)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


@pytest.fixture
def sender(backend: CollectiveBackend, directory: Path) -> Iterator[WeightSender]:
    sender = WeightSender(backend=backend, directory=directory)
    yield sender
    sender.close()


@pytest.fixture
def spawn_peer(directory: Path, group_prefix: str) -> Iterator[Callable[..., Peer]]:
    """Starts peer.py with these arguments, or in an interpreter that runs `before` first; ended with the test."""
    peers: list[Peer] = []

    def spawn(*arguments: str, before: str = "") -> Peer:
        if not before:
            peers.append(ForkedPeer(arguments, group_prefix))
            return peers[-1]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        program = [
            before,
            "import runpy",
            "from coati_rl.transport import wire",
            "token_hex = wire.token_hex",
            f"wire.token_hex = lambda num_bytes: {group_prefix!r} + token_hex(num_bytes)",
            f"runpy.run_path({str(PEER)!r}, run_name='__main__')",
        ]
        command = [sys.executable, "-c", "\n".join(program), *arguments]
        peers.append(
            subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        return peers[-1]

    yield spawn
    for peer in peers:
        peer.kill()
        peer.communicate()
