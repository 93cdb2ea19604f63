"""Names in /dev/shm of what a process maps: they go, other processes' stay, and what is mapped stays usable."""

import multiprocessing
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from coati_rl.runtime.shared_memory import SHARED_MEMORY, family, unlink_mapped

HOLDER = """
import os, signal, sys
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=4096)
semaphore = get_context("spawn").Semaphore()
print(segment.name, semaphore._semlock.name, flush=True)
sys.stdin.readline()
segment.buf[0] = 7
semaphore.acquire(), semaphore.release()
print(segment.buf[0], flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def holder():
    """A process that holds a segment and a semaphore, and their paths."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    segment, semaphore = process.stdout.readline().split()
    tracker = psutil.Process(process.pid).children()  # Ray kills the tracker with its process, and so does this test
    yield process, [SHARED_MEMORY / segment, SHARED_MEMORY / f"sem.{semaphore.removeprefix('/')}"]
    process.kill()
    for child in tracker:
        child.kill()
    process.communicate()


def test_the_names_of_a_process_go_and_what_it_holds_stays_usable(holder):
    process, paths = holder
    assert all(path.exists() for path in paths)
    unlink_mapped([process.pid])
    assert not any(path.exists() for path in paths)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "7\n"


def test_the_names_of_other_processes_stay(holder):
    _, paths = holder
    mine = SharedMemory(create=True, size=16)
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    unlink_mapped([multiprocessing.current_process().pid, 2**22])  # the other has ended
    assert all(path.exists() for path in paths)
    assert not Path(SHARED_MEMORY, mine.name).exists()
    with pytest.raises(FileNotFoundError):
        mine.unlink()
    mine.close()
    assert semaphore.acquire()


def test_a_family_is_a_process_and_what_descends_from_it(holder):
    process, _ = holder
    assert {multiprocessing.current_process().pid, process.pid} <= set(family())
