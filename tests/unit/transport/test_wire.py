"""Test a transfer between threads: received tensors, what the digest covers, refusals."""

import os
from collections.abc import Iterable

import psutil
import pytest
import torch
import xxhash

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import Group, join_group
from coati_rl.transport.manifest import build_manifest
from coati_rl.transport.wire import WeightSender
from tests.unit.transport.receivers import CPU, Receivers

Named = list[tuple[str, torch.Tensor]]


def weights() -> Named:
    """Odd sizes, three dtypes, a scalar, a view that is not contiguous, and one tensor above the bucket size."""
    random = torch.Generator().manual_seed(0)
    return [
        ("embed", torch.randn(33, 7, generator=random)),
        ("scalar", torch.tensor(3.0, dtype=torch.bfloat16)),
        ("transposed", torch.randn(5, 9, generator=random).T),
        ("large", torch.randn(700, generator=random).to(torch.bfloat16)),
        ("half", torch.randn(3, 1, 2, generator=random).half()),
    ]


def transfer(sender: WeightSender, receivers: Receivers, tensors: Named, *, version: int = 1, bucket_bytes: int = 512):
    manifest = build_manifest(tensors, policy_version=version, bucket_bytes=bucket_bytes)
    futures = receivers.start(manifest)
    digest = sender.send(manifest, tensors, timeout_s=20.0)
    return digest, [future.result(timeout=60.0) for future in futures]


def test_every_rank_of_every_engine_gets_the_same_bits(sender, backend):
    receivers = Receivers(sender.open([1, 2]), [1, 2])
    digest, staged = transfer(sender, receivers, weights())
    assert len(staged) == (3 if backend == "shm" else 2)  # others receive once for all ranks of an engine
    for one in staged:
        assert (one.digest, one.policy_version) == (digest, 1)
        assert [name for name, _ in one.tensors] == [name for name, _ in weights()]
        for (_, received), (_, sent) in zip(one.tensors, weights(), strict=True):
            assert received.dtype == sent.dtype
            assert torch.equal(received, sent)


def test_the_digest_is_of_all_bytes_in_order_without_padding_whatever_the_buckets(sender):
    receivers = Receivers(sender.open([1]), [1])
    for bucket_bytes, tensors in ((16, weights()[1:3]), (512, weights()), (2**20, weights())):
        raw = b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for _, tensor in tensors)
        digest, _ = transfer(sender, receivers, tensors, bucket_bytes=bucket_bytes)
        assert digest == xxhash.xxh3_128(raw).hexdigest()


def test_a_group_serves_many_updates_and_staged_tensors_are_good_until_the_engine_stages_the_next(sender, backend):
    receivers = Receivers(sender.open([1, 1]), [1, 1])
    before: list[torch.Tensor] = []
    for version in range(1, 6):
        multiples = [(name, version * tensor) for name, tensor in weights()]
        _, staged = transfer(sender, receivers, multiples, version=version, bucket_bytes=2 ** (7 + version))
        if backend == "shm":  # a sender may pack the next update before the engine stages it
            for tensor, (_, sent) in zip(before, weights(), strict=bool(before)):
                assert torch.equal(tensor, (version - 1) * sent)
        for one in staged:
            assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(one.tensors, multiples, strict=True))
        before = [tensor for _, tensor in staged[0].tensors]


def test_staged_tensors_survive_their_group(sender):
    receivers = Receivers(sender.open([1]), [1])
    _, (staged,) = transfer(sender, receivers, weights())
    sender.close()
    receivers.close()
    assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(staged.tensors, weights(), strict=True))


def test_new_members_mean_a_new_group_and_a_new_secret(sender):
    (old,) = sender.open([1])
    transfer(sender, Receivers([old], [1]), weights())
    new = sender.open([1, 1])
    assert len({invitation.secret for invitation in new}) == 1 and new[0].secret != old.secret
    assert [invitation.first_rank for invitation in new] == [1, 2]
    assert {invitation.world_size for invitation in new} == {3}
    _, staged = transfer(sender, Receivers(new, [1, 1]), weights(), version=2)
    assert len(staged) == 2


def test_open_waits_for_nobody_and_needs_members(sender):
    sender.open([4, 4])
    assert sender.is_open
    for nobody in ([], [1, 0]):
        with pytest.raises(ValueError, match="world_sizes"):
            sender.open(nobody)


def test_nothing_listens_outside_of_the_loopback(sender, backend):
    before = listening()
    receivers = Receivers(sender.open([1]), [1])
    transfer(sender, receivers, weights())
    opened = listening() - before
    assert len(opened) == (0 if backend == "file" else 2)  # each end of the group
    assert {ip for ip, _ in opened} <= {"127.0.0.1"}


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process(os.getpid()).net_connections()
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["embed", "scalar", "large", "half"])
def test_a_value_that_is_not_finite_is_refused_by_name_and_nobody_stages_it(sender, name, value):
    broken = [(n, tensor.clone()) for n, tensor in weights()]
    dict(broken)[name].view(-1)[-1] = value
    manifest = build_manifest(broken, policy_version=1, bucket_bytes=512)
    (future,) = Receivers(sender.open([1]), [1]).start(manifest)
    with pytest.raises(TransferError, match=f"rank 0 of 2, .*rank 1 gave up: .*tensor '{name}' holds NaN"):
        sender.send(manifest, broken, timeout_s=20.0)
    with pytest.raises(TransferError, match=f"tensor '{name}' holds NaN or infinity"):
        future.result(timeout=60.0)
    assert not sender.is_open


def missing(tensors: Named) -> Iterable[tuple[str, torch.Tensor]]:
    return tensors[:-1]


def surplus(tensors: Named) -> Iterable[tuple[str, torch.Tensor]]:
    return [*tensors, ("more", torch.zeros(1))]


def swapped(tensors: Named) -> Iterable[tuple[str, torch.Tensor]]:
    return [tensors[1], tensors[0], *tensors[2:]]


def reshaped(tensors: Named) -> Iterable[tuple[str, torch.Tensor]]:
    return [("embed", tensors[0][1].T), *tensors[1:]]


def retyped(tensors: Named) -> Iterable[tuple[str, torch.Tensor]]:
    return [("embed", tensors[0][1].bfloat16()), *tensors[1:]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (missing, "'half' of the manifest is missing"),
        (surplus, "'more' is not in the manifest"),
        (swapped, "announces .*'embed'.*next comes .*'scalar'"),
        (reshaped, r"\(33, 7\).*\(7, 33\)"),
        (retyped, "float32.*bfloat16"),
    ],
)
def test_tensors_that_are_not_the_announced_ones_are_refused(sender, fault, message):
    manifest = build_manifest(weights(), policy_version=1, bucket_bytes=512)
    (future,) = Receivers(sender.open([1]), [1]).start(manifest)
    with pytest.raises(TransferError, match=message):
        sender.send(manifest, fault(weights()), timeout_s=20.0)
    with pytest.raises(TransferError, match=message):
        future.result(timeout=60.0)


def test_one_bit_that_changes_on_the_way_is_noticed_by_everyone(sender, monkeypatch):
    manifest = build_manifest(weights(), policy_version=4, bucket_bytes=512)
    receivers = Receivers(sender.open([1, 1]), [1, 1])
    start = Group.start

    def flip_a_bit(group: Group, index: int, **settings: object) -> None:
        if group.rank == 0 and index == 2:  # packed and digested by now
            group.buffer(index)[20] ^= 1  # of "transposed", behind the scalar and its padding
        start(group, index, **settings)

    monkeypatch.setattr(Group, "start", flip_a_bit)
    futures = receivers.start(manifest)
    with pytest.raises(TransferError, match=r"version 4: the digest .* that of the bytes on rank"):
        sender.send(manifest, weights(), timeout_s=20.0)
    for future in futures:
        with pytest.raises(TransferError, match=r"version 4: the digest .* that of the bytes on rank"):
            future.result(timeout=60.0)


def test_without_an_open_group_nothing_is_sent(sender):
    with pytest.raises(TransferError, match="open"):
        sender.send(build_manifest(weights(), policy_version=1), weights(), timeout_s=1.0)


def test_an_invitation_to_a_group_that_is_gone_is_refused_at_once(sender):
    (invitation,) = sender.open([1])
    sender.close()
    with pytest.raises(TransferError, match="cannot reach the trainer"):
        join_group(invitation, rank=1, device=CPU, deadline=Deadline(20.0))
