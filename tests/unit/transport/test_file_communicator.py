"""Test broadcasts over files in a shared directory: received data, number of files, refusals."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coati_rl.errors import TransferError, TransferTimeoutError
from coati_rl.transport.communicator import Operation, barrier, broadcast_text
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.file_communicator import FileCommunicator


def deadline() -> Deadline:
    return Deadline(20.0)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[FileCommunicator]]:
    members = [FileCommunicator(tmp_path / "group", rank=rank, world_size=3) for rank in range(3)]
    yield members
    for member in members:
        member.close()
    assert not list(tmp_path.iterdir())


def start(members: list[FileCommunicator], value: int, *, root: int) -> list[tuple[Operation, torch.Tensor]]:
    """All members begin to broadcast three bytes of the root."""
    words = [torch.full((3,), value if rank == root else 0, dtype=torch.uint8) for rank in range(len(members))]
    pairs = zip(members, words, strict=True)
    return [(member.start(word, root=root, deadline=deadline(), what="starting"), word) for member, word in pairs]


def test_every_member_has_what_each_root_sent_also_when_operations_are_started_ahead(members) -> None:
    first, second = start(members, 7, root=1), start(members, 8, root=2)
    for value, operations in ((7, first), (8, second)):
        for operation, word in operations:
            operation.wait(deadline=deadline(), what="waiting")
            assert word.tolist() == [value] * 3


def test_files_are_kept_until_all_have_read_them_and_no_longer(members, tmp_path: Path) -> None:
    early = start(members, 7, root=0)
    for operation, _ in early[:2]:  # the third member is slow
        operation.wait(deadline=deadline(), what="waiting")
    for count in range(30):
        root = count % 2
        for operation, _ in start(members[:2], count, root=root):
            operation.wait(deadline=deadline(), what="waiting")
    assert len(list((tmp_path / "group").iterdir())) == 31
    late = [
        members[2].start(torch.zeros(3, dtype=torch.uint8), root=i % 2, deadline=deadline(), what="") for i in range(30)
    ]
    for operation in (early[2][0], *late):
        operation.wait(deadline=deadline(), what="waiting")
    assert early[2][1].tolist() == [7] * 3
    for count in range(30):
        for operation, _ in start(members, count, root=count % 3):
            operation.wait(deadline=deadline(), what="waiting")
    assert len(list((tmp_path / "group").iterdir())) <= 6  # two rounds


def test_texts_and_meetings_work_between_threads(members) -> None:
    heard = [""] * 3

    def take_part(rank: int) -> None:
        heard[rank] = broadcast_text(members[rank], f"of {rank}", root=2, deadline=deadline(), what="a text")
        barrier(members[rank], rank=rank, world_size=3, deadline=deadline(), what="meeting")

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == ["of 2"] * 3


def test_what_never_comes_is_waited_for_until_the_deadline(members, tmp_path: Path) -> None:
    operation = members[1].start(torch.zeros(3, dtype=torch.uint8), root=0, deadline=deadline(), what="")
    (tmp_path / "group" / "operation-0.unfinished").write_bytes(bytes(11))  # what a root that died leaves
    begin = time.monotonic()
    with pytest.raises(TransferTimeoutError, match=r"waiting for rank 0: not done within 0\.3 s"):
        operation.wait(deadline=Deadline(0.3), what="waiting for rank 0")
    assert 0.3 <= time.monotonic() - begin < 5.0


def test_a_file_of_another_size_is_refused(members, tmp_path: Path) -> None:
    operation = members[1].start(torch.zeros(3, dtype=torch.uint8), root=0, deadline=deadline(), what="")
    (tmp_path / "group" / "operation-0").write_bytes(bytes(12))
    with pytest.raises(TransferError, match=r"waiting: .*operation-0 has 12 bytes, not 8 and 3"):
        operation.wait(deadline=deadline(), what="waiting")


def test_a_directory_that_is_not_there_is_no_reason_to_wait(tmp_path: Path) -> None:
    member = FileCommunicator(tmp_path / "elsewhere", rank=1, world_size=2)
    operation = member.start(torch.zeros(1, dtype=torch.uint8), root=0, deadline=deadline(), what="")
    with pytest.raises(TransferError, match=r"waiting: cannot open .*elsewhere.* needs a disk that all members share"):
        operation.wait(deadline=deadline(), what="waiting")
    sender = member.start(torch.zeros(1, dtype=torch.uint8), root=0, deadline=deadline(), what="")
    assert sender is not operation
    with pytest.raises(TransferError, match=r"sending: cannot write .*elsewhere"):
        member.start(torch.zeros(1, dtype=torch.uint8), root=1, deadline=deadline(), what="sending")
