"""Test several senders in one group: every member receives the same data, however it is divided over senders."""

from collections.abc import Sequence

import pytest
import torch
import xxhash

from coati_rl.errors import TransferError
from coati_rl.transport.gloo import GlooCommunicator
from coati_rl.transport.group import Group
from coati_rl.transport.manifest import TensorEntry, WeightManifest
from coati_rl.transport.wire import WeightSender
from tests.unit.transport.receivers import Receivers
from tests.unit.transport.senders import Named, OtherSenders, announce
from tests.unit.transport.test_wire import weights as tensors_of_all_kinds


def weights() -> Named:
    """In Hugging Face order: all kinds of tensors, and one more for the last stage."""
    return [*tensors_of_all_kinds(), ("head", torch.arange(11.0))]


def cut(tensors: Named, *sizes: int) -> list[Named]:
    """Stages of these numbers of tensors."""
    rest = iter(tensors)
    return [[next(rest) for _ in range(size)] for size in sizes]


def raw(tensors: Named) -> bytes:
    return b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for _, tensor in tensors)


def transfer(sender: WeightSender, others: OtherSenders, receivers: Receivers, stages: Sequence[Named], **settings):
    """Returns: the digests of all senders, and what the engines have staged."""
    manifest = announce(stages, **settings)
    receiving, sending = receivers.start(manifest), others.start(manifest, stages[1:])
    digest = sender.send(manifest, stages[0], timeout_s=20.0)
    return [digest, *(future.result(20.0) for future in sending)], [future.result(20.0) for future in receiving]


def open_group(sender: WeightSender, num_senders: int, sizes: Sequence[int] = (1, 1)) -> tuple[OtherSenders, Receivers]:
    receivers = Receivers(sender.open(sizes, num_senders=num_senders), list(sizes))
    return OtherSenders(sender.sender_invitations), receivers


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sizes", [(4, 2), (1, 3, 2), (2, 0, 4)])
def test_every_engine_gets_all_stages_and_every_member_the_digest_of_the_whole_stream(sender, sizes, backend):
    others, receivers = open_group(sender, len(sizes), (1, 2))
    for version, bucket_bytes in ((1, 64), (2, 512), (3, 2**20)):  # over the same group
        tensors = [(name, version * tensor) for name, tensor in weights()]
        digests, staged = transfer(sender, others, receivers, cut(tensors, *sizes), bucket_bytes=bucket_bytes)
        assert digests == [xxhash.xxh3_128(raw(tensors)).hexdigest()] * len(sizes)
        assert [one.digest for one in staged] == digests[:1] * (3 if backend == "shm" else 2)
        for one in staged:
            assert [name for name, _ in one.tensors] == [name for name, _ in tensors]
            assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(one.tensors, tensors, strict=True))


def test_senders_may_take_turns_as_often_as_the_order_of_the_tensors_asks_for(sender):
    others, receivers = open_group(sender, 2)
    entries = [
        TensorEntry(name="a", dtype="float32", shape=(2,), sender=1),
        TensorEntry(name="b", dtype="float32", shape=(2,), sender=0),
        TensorEntry(name="c", dtype="float32", shape=(2,), sender=1),
    ]
    manifest = WeightManifest(policy_version=1, entries=tuple(entries))
    a, b, c = (("a", torch.ones(2)), ("b", 2 * torch.ones(2)), ("c", 3 * torch.ones(2)))
    receiving, sending = receivers.start(manifest), others.start(manifest, [[a, c]])
    digest = sender.send(manifest, [b], timeout_s=20.0)
    assert digest == sending[0].result(20.0) == xxhash.xxh3_128(raw([a, b, c])).hexdigest()
    assert [future.result(20.0).digest for future in receiving] == [digest, digest]


@pytest.mark.parametrize("backend", ["gloo"])
@pytest.mark.parametrize(
    ("stages", "buckets"),
    [
        # float32 tensors of 12, 20 and 16 bytes are 16, 32 and 16 with padding; the bucket has room for 48.
        ((3,), [(0, 48), (0, 16)]),
        ((1, 2), [(0, 16), (1, 48)]),
        ((1, 1, 1), [(0, 16), (1, 32), (2, 16)]),
    ],
)
def test_on_the_wire_are_the_buckets_of_each_sender_and_then_the_digests_of_all(sender, monkeypatch, stages, buckets):
    seen: dict[int, list[tuple[int, int]]] = {}
    start = GlooCommunicator.start

    def record(communicator: GlooCommunicator, data: torch.Tensor, *, root: int, **settings: object) -> object:
        seen.setdefault(id(communicator), []).append((root, data.numel()))
        return start(communicator, data, root=root, **settings)

    monkeypatch.setattr(GlooCommunicator, "start", record)
    tensors = [("a", torch.ones(3)), ("b", torch.ones(5)), ("c", torch.ones(4))]
    transfer(sender, *open_group(sender, len(stages), (1,)), cut(tensors, *stages), bucket_bytes=48)
    digests = [(rank, 16) for rank in range(len(stages) + 1)]
    assert list(seen.values()) == [buckets + digests] * (len(stages) + 1)


def test_senders_come_before_the_engines_in_the_group_and_each_has_an_invitation(sender, backend):
    assert sender.sender_invitations == ()
    engines = sender.open([1, 2], num_senders=3)
    assert [invitation.first_rank for invitation in sender.sender_invitations] == [1, 2]
    assert [invitation.first_rank for invitation in engines] == [3, 4]
    assert {invitation.world_size for invitation in (*engines, *sender.sender_invitations)} == {
        6 if backend == "shm" else 5
    }
    sender.open([1])
    assert sender.sender_invitations == ()
    with pytest.raises(ValueError, match="num_senders 0"):
        sender.open([1], num_senders=0)


def missing(share: Named) -> Named:
    return share[:-1]


def surplus(share: Named) -> Named:
    return [*share, ("more", torch.zeros(1))]


def reshaped(share: Named) -> Named:
    return [(share[0][0], share[0][1][:-1]), *share[1:]]


def retyped(share: Named) -> Named:
    return [(share[0][0], share[0][1].float()), *share[1:]]


def not_finite(share: Named) -> Named:
    return [*share[:-1], (share[-1][0], share[-1][1] / 0)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (missing, "'head' of the manifest is missing"),
        (surplus, "'more' is not in the manifest"),
        (reshaped, r"announces .*'large'.*\(700,\).*\(699,\)"),
        (retyped, "bfloat16.*float32"),
    ],
)
def test_another_senders_tensors_are_checked_too_and_everyone_learns_what_is_wrong(sender, fault, message):
    stages = cut(weights(), 3, 3)
    manifest = announce(stages, bucket_bytes=512)
    others, receivers = open_group(sender, 2)
    receiving, sending = receivers.start(manifest), others.start(manifest, [fault(stages[1])])
    with pytest.raises(TransferError, match=f"rank 0 of 4, .*: rank 1 gave up: .*{message}"):
        sender.send(manifest, stages[0], timeout_s=20.0)
    for future in (*receiving, *sending):
        with pytest.raises(TransferError, match=message):
            future.result(20.0)
    assert not sender.is_open
    assert not others.senders[0].is_open


def test_what_is_not_finite_is_refused_by_the_engines_whoever_sent_it(sender):
    stages = cut(weights(), 3, 3)
    others, receivers = open_group(sender, 2)
    manifest = announce(stages, bucket_bytes=512)
    futures = [*receivers.start(manifest), *others.start(manifest, [not_finite(stages[1])])]
    with pytest.raises(TransferError, match=r"rank 0 of 4, .*: rank [23] gave up: .*'head' holds NaN or infinity"):
        sender.send(manifest, stages[0], timeout_s=20.0)
    for future in futures:
        with pytest.raises(TransferError, match="'head' holds NaN or infinity"):
            future.result(20.0)


def test_a_sender_without_tensors_must_have_none(sender):
    stages = [weights()[:3], [], weights()[3:]]
    manifest = announce(stages)
    others, receivers = open_group(sender, 3)
    futures = [*receivers.start(manifest), *others.start(manifest, [weights()[:1], stages[2]])]
    with pytest.raises(TransferError, match=r"rank 1 gave up: .*'embed' is not in the manifest"):
        sender.send(manifest, stages[0], timeout_s=20.0)
    for future in futures:
        with pytest.raises(TransferError, match="'embed' is not in the manifest"):
            future.result(20.0)


@pytest.mark.parametrize("backend", ["gloo"])
def test_whoever_cannot_connect_names_the_member_that_gave_up(sender, monkeypatch):
    """gloo only knows that a connection was closed while it connected others; why, the member says."""
    connect, lost = GlooCommunicator.__init__, []

    def lose_a_connection(communicator: GlooCommunicator, *arguments: object, rank: int, **settings: object) -> None:
        connect(communicator, *arguments, rank=rank, **settings)
        if rank == 0:
            lost.append(communicator)
            raise TransferError("connection closed by peer")

    monkeypatch.setattr(GlooCommunicator, "__init__", lose_a_connection)
    stages = [weights()[:3], [], weights()[3:]]
    manifest = announce(stages)
    others, receivers = open_group(sender, 3)
    futures = [*receivers.start(manifest), *others.start(manifest, [weights()[:1], stages[2]])]
    with pytest.raises(TransferError, match=r"rank 0 of 5, connecting: rank 1 gave up: .*'embed' is not in the mani"):
        sender.send(manifest, stages[0], timeout_s=20.0)
    lost[0].close()
    for future in futures:
        with pytest.raises(TransferError, match="'embed' is not in the manifest"):
            future.result(20.0)


def test_a_manifest_of_more_senders_than_the_group_has_is_refused(sender):
    manifest = announce(cut(weights(), 3, 3))
    (future,) = Receivers(sender.open([1]), [1]).start(manifest)
    with pytest.raises(TransferError, match="2 senders, the group has 1"):
        sender.send(manifest, weights()[:3], timeout_s=20.0)
    with pytest.raises(TransferError, match="2 senders, the group has 1"):
        future.result(20.0)


def test_a_sender_that_has_seen_other_bytes_ends_the_transfer_for_everyone(sender, monkeypatch):
    finish = Group.finish

    def flip_a_bit(group: Group, index: int, **settings: object) -> None:
        finish(group, index, **settings)
        if group.rank == 1 and index == 0:
            received = group.buffer(index).clone()
            received[2] ^= 1
            monkeypatch.setattr(group, "buffer", lambda index: received)

    monkeypatch.setattr(Group, "finish", flip_a_bit)
    stages = [weights()[:6], []]
    manifest = WeightManifest(policy_version=4, entries=announce(stages).entries)
    others, receivers = open_group(sender, 2)
    futures = [*receivers.start(manifest), *others.start(manifest, stages[1:])]
    with pytest.raises(TransferError, match=r"version 4: the digest .* that of the bytes on rank"):
        sender.send(manifest, stages[0], timeout_s=20.0)
    for future in futures:
        with pytest.raises(TransferError, match=r"version 4: the digest .* that of the bytes on rank"):
            future.result(20.0)
