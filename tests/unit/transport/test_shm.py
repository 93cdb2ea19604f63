"""Test segments of shared memory: access rights, lifetime of the name, and a full /dev/shm."""

import os
import stat
import subprocess
import sys

import pytest
import torch

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.shm import SHM_DIRECTORY, ShmSegment


@pytest.fixture
def group() -> str:
    return f"test{os.getpid()}"


def names(group: str) -> list[str]:
    return [path.name for path in SHM_DIRECTORY.glob(f"coati-{group}*")]


def test_it_has_a_name_until_all_have_opened_it_and_no_pages_before(group):
    owner, other = ShmSegment(group, "0", 2**20), ShmSegment(group, "0", 2**20)
    text = owner.create()
    state = (SHM_DIRECTORY / f"coati-{group}-0").stat()
    assert (stat.S_IMODE(state.st_mode), state.st_blocks) == (0o600, 0)
    other.open(text)
    owner.remove_name()
    other.remove_name()  # whoever comes first
    assert names(group) == []
    written = owner.map(is_owner=True, deadline=Deadline(10.0), what="mapping")
    read = other.map(is_owner=False, deadline=Deadline(10.0), what="mapping")
    written.copy_(torch.arange(2**20) % 251)
    assert torch.equal(read, written)
    del written, owner
    assert int(read[250]) == 250  # as long as anyone has it


def test_a_size_that_does_not_fit_is_refused_with_both_sizes_and_the_remedy(group):
    owner = ShmSegment(group, "0", 2**50)
    owner.create()
    owner.remove_name()
    message = rf"/dev/shm has \d+ bytes available; {2**50} are needed.*--shm-size.*--weight-transport gloo"
    with pytest.raises(TransferError, match=message):
        owner.map(is_owner=True, deadline=Deadline(10.0), what="mapping")


FULL_FOR_A_WHILE = """
import os, threading, time
from coati_rl.transport.allocation import allocate
from coati_rl.transport.deadline import Deadline

others = os.open("/dev/shm/others", os.O_CREAT | os.O_RDWR)
os.posix_fallocate(others, 0, 3 * 2**20)
threading.Timer(0.5, os.ftruncate, (others, 0)).start()
own, begin = os.open("/dev/shm/own", os.O_CREAT | os.O_RDWR), time.monotonic()
allocate(own, 3 * 2**20, deadline=Deadline(20.0), what="mapping")
print(os.fstat(own).st_blocks * 512, time.monotonic() - begin > 0.4)
"""


def test_room_that_others_take_for_a_while_is_waited_for():
    small = ["bwrap", "--dev-bind", "/", "/", "--size", str(4 * 2**20), "--tmpfs", "/dev/shm"]
    done = subprocess.run([*small, sys.executable, "-c", FULL_FOR_A_WHILE], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(3 * 2**20), "True"], done.stderr


def test_another_node_or_user_is_told_what_to_choose(group):
    with pytest.raises(TransferError, match=r"one node and one user: choose --weight-transport gloo"):
        ShmSegment(group, "0", 16).open("")


def test_a_name_that_exists_is_never_taken_over(group):
    first = ShmSegment(group, "0", 16)
    first.create()
    with pytest.raises(TransferError, match="cannot create shared memory"):
        ShmSegment(group, "0", 16).create()
    first.remove_name()
    first.close()
