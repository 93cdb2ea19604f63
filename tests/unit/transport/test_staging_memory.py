"""Test the host memory that an engine's ranks share, and updates that are copied there bucket by bucket."""

import os
import subprocess
import sys
from contextlib import closing

import pytest
import torch

from coati_rl.errors import TransferError
from coati_rl.transport import group
from coati_rl.transport.collective import CollectiveTransport
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.manifest import build_manifest
from coati_rl.transport.staging_memory import HostMemory, SharedFile
from coati_rl.transport.wire import WeightSender, map_received
from tests.unit.transport.receivers import Receivers
from tests.unit.transport.test_wire import transfer, weights


def reserve(memory: HostMemory, num_bytes: int = 4096) -> torch.Tensor:
    return memory.reserve(num_bytes, deadline=Deadline(5.0), what="preparing")


def test_ranks_map_the_same_memory_from_the_path_and_no_name_is_left() -> None:
    shared = SharedFile(4096)
    assert not [name for name in os.listdir("/dev/shm") if "coati-weights" in name]
    first, second = HostMemory(shared.path), HostMemory(shared.path)
    reserve(first)[7] = 5
    assert reserve(second)[7] == 5
    program = f"import mmap, os; print(mmap.mmap(os.open({shared.path!r}, os.O_RDWR), 4096)[7])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "5\n"
    shared.close()
    assert reserve(first)[7] == 5  # it is mapped
    with pytest.raises(TransferError, match="preparing: 4096 bytes of host memory"):
        reserve(HostMemory(shared.path))


def test_memory_is_kept_until_it_is_discarded_or_another_size_is_needed() -> None:
    memory = HostMemory()
    place = reserve(memory).data_ptr()
    assert reserve(memory).data_ptr() == place
    reserve(memory)[0] = 1
    memory.discard()
    assert reserve(memory)[0] == 0
    assert reserve(memory, 8192).numel() == 8192


def test_another_file_under_the_same_path_is_another_memory() -> None:
    """A descriptor's number is used again, and a rank that kept the old memory would load old weights."""
    old = SharedFile(4096)
    memory, path = HostMemory(old.path), old.path
    reserve(memory)
    assert memory.is_of(path)
    old.close()
    new = SharedFile(4096)
    assert new.path == path
    assert not memory.is_of(path)
    new.close()


def test_a_deadline_ends_the_allocation() -> None:
    with pytest.raises(TransferError, match="host memory: not done within"):
        HostMemory().reserve(4096, deadline=Deadline(0.0), what="preparing")


MANIFEST = build_manifest(weights(), policy_version=1, bucket_bytes=512)


@pytest.mark.parametrize("carrier", ["gloo", "file"])  # with shm each rank maps the sender's memory
def test_one_rank_receives_for_all_and_the_others_have_its_bits(carrier, directory) -> None:
    with closing(WeightSender(backend=carrier, directory=directory)) as sender:
        (invitation,) = sender.open([4])
        assert (invitation.has_one_receiver, invitation.world_size) == (True, 2)
        shared = SharedFile(MANIFEST.num_staged_bytes)
        receivers = Receivers([invitation], [4], memories=[HostMemory(shared.path)])
        digest, (received,) = transfer(sender, receivers, weights())
        other = map_received(MANIFEST, memory=HostMemory(shared.path), deadline=Deadline(5.0))
        shared.close()
    assert (received.digest, other.digest) == (digest, "")
    for (_, mine), (_, theirs), (_, sent) in zip(other.tensors, received.tensors, weights(), strict=True):
        assert mine.data_ptr() != theirs.data_ptr()
        assert torch.equal(mine, sent)


def test_what_arrives_on_another_device_is_staged_bucket_by_bucket_through_two_buckets(directory, monkeypatch) -> None:
    """As over NCCL into host memory, with gloo's tensors for those of a GPU."""
    made: list[CollectiveTransport] = []

    def copied(communicator, rendezvous, *, rank, device):
        made.append(CollectiveTransport(communicator, device=device, is_copied=True))
        return made[-1]

    monkeypatch.setattr(group, "_make_transport", copied)
    with closing(WeightSender(directory=directory)) as sender:
        receivers = Receivers(sender.open([1]), [1])
        for version in (1, 2, 3):
            multiples = [(name, version * tensor) for name, tensor in weights()]
            _, (received,) = transfer(sender, receivers, multiples, version=version)
            for (_, got), (_, sent) in zip(received.tensors, multiples, strict=True):
                assert torch.equal(got, sent)
        assert [[each.numel() for each in transport._scratch] for transport in made] == [[512, 512]] * 2
    broken = [(name, tensor.clone()) for name, tensor in weights()]
    broken[3][1][650] = float("nan")  # in the last of the parts of "large", bfloat16[700]
    with closing(WeightSender(directory=directory)) as sender:
        (future,) = Receivers(sender.open([1]), [1]).start(MANIFEST)
        with pytest.raises(TransferError, match="tensor 'large' holds NaN"):
            sender.send(MANIFEST, broken, timeout_s=20.0)
        with pytest.raises(TransferError, match="tensor 'large' holds NaN"):
            future.result(timeout=60.0)
