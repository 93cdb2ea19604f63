"""Test that names in /dev/shm that a process maps are removed, others stay, and mapped memory stays usable."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from coati_rl.processes.shared_memory import SHARED_MEMORY, family, unlink_mapped

HOLDER = """
import os, sys
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=4096)
semaphore = get_context("spawn").Semaphore()
print(segment.name, semaphore._semlock.name, flush=True)
sys.stdin.readline()
segment.buf[0] = 7
semaphore.acquire(), semaphore.release()
print(segment.buf[0], flush=True)
os._exit(0)
"""


Holder = tuple[subprocess.Popen[str], list[Path]]


@pytest.fixture
def hold() -> Iterator[Callable[[], Holder]]:
    """Starts a process that holds a segment and a semaphore; their paths."""
    with ExitStack() as ends:
        yield lambda: ends.enter_context(_held())


@contextmanager
def _held() -> Iterator[Holder]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        segment, semaphore = process.stdout.readline().split()
        trackers = psutil.Process(process.pid).children()
        paths = [SHARED_MEMORY / segment, SHARED_MEMORY / f"sem.{semaphore.removeprefix('/')}"]
        yield process, paths
        for killed in (*trackers, process):  # the tracker first, as when Ray kills an actor: nobody cleans up
            killed.kill()
    for path in paths:
        path.unlink(missing_ok=True)


def test_the_names_of_a_process_go_what_it_holds_stays_usable_and_those_of_others_stay(
    hold: Callable[[], Holder],
) -> None:
    (process, names), (_, names_of_another) = hold(), hold()
    assert all(path.exists() for path in (*names, *names_of_another))
    unlink_mapped([process.pid])
    assert [path for path in (*names, *names_of_another) if path.exists()] == names_of_another
    out, _ = process.communicate("\n", timeout=30)
    assert out == "7\n"


def test_a_process_that_has_ended_holds_nothing(hold: Callable[[], Holder]) -> None:
    (process, names), (ended, _) = hold(), hold()
    ended.kill()
    ended.wait()
    unlink_mapped([ended.pid])
    assert all(path.exists() for path in names)
    assert process.poll() is None


def test_a_family_is_a_process_and_what_descends_from_it(hold: Callable[[], Holder]) -> None:
    process, _ = hold()
    assert {os.getpid(), process.pid, *(child.pid for child in psutil.Process(process.pid).children())} <= set(family())
