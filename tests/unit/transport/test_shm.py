"""Test segments of shared memory: access rights, lifetime of the name, and a full /dev/shm."""

import os
import stat
import time

import pytest
import torch

from coati_rl.errors import TransferError, TransferTimeoutError
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


@pytest.fixture
def full_until(monkeypatch):
    """Let a file system say that it has no room until it has been asked so often."""

    def make(num_looks):
        looks = iter(range(num_looks))
        real = os.fstatvfs

        def fstatvfs(descriptor):
            found = real(descriptor)
            return found if next(looks, None) is None else os.statvfs_result([*found[:4], 0, *found[5:]])

        monkeypatch.setattr(os, "fstatvfs", fstatvfs)

    return make


def test_room_that_others_take_for_a_while_is_waited_for(group, full_until):
    full_until(2)
    owner = ShmSegment(group, "0", 2**20)
    owner.create()
    owner.remove_name()
    begin = time.monotonic()
    assert owner.map(is_owner=True, deadline=Deadline(10.0), what="mapping").numel() == 2**20
    assert time.monotonic() - begin >= 0.1, "two waits of 0.05 s"


def test_room_that_does_not_come_ends_the_transfer_at_its_deadline_with_the_remedy(group, full_until):
    full_until(10**6)
    owner = ShmSegment(group, "0", 2**20)
    owner.create()
    owner.remove_name()
    with pytest.raises(TransferTimeoutError, match=r"has 0 bytes available; 1048576 are needed.* not done within"):
        owner.map(is_owner=True, deadline=Deadline(0.1), what="mapping")


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
