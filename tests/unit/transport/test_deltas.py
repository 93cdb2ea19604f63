"""Test updates that are sent as what differs from the last one: the same bits, or an error and then the whole."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coati_rl.errors import TransferError
from coati_rl.transport import delta, files
from coati_rl.transport.manifest import WeightManifest, build_manifest
from coati_rl.transport.wire import WeightSender
from tests.unit.transport.receivers import Receivers

Named = list[tuple[str, torch.Tensor]]
BUCKET_BYTES = 4096


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each file that was written is a delta."""
    kinds, save = list[bool](), files.save_file

    def note(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None) -> None:
        kinds.append(metadata is not None)
        save(tensors, path, metadata)

    monkeypatch.setattr(files, "save_file", note)
    return kinds


@pytest.fixture
def sender(directory: Path) -> Iterator[WeightSender]:
    sender = WeightSender(backend="file", directory=directory, sends_deltas=True)
    yield sender
    sender.close()


def weights(rng: np.random.Generator) -> Named:
    """Tensors of two dtypes; one is larger than a bucket."""
    numbers = torch.from_numpy(rng.standard_normal(5000).astype(np.float32))
    return [("a", numbers[:3000].bfloat16()), ("b", numbers[3000:3007]), ("c", numbers[3007:].half().view(-1, 1))]


def changed(tensors: Named, rng: np.random.Generator) -> Named:
    """The same with the last bits of some numbers flipped."""
    found = []
    for name, tensor in tensors:
        bits = tensor.clone().view(torch.uint8)
        bits.view(-1)[:: tensor.itemsize] ^= torch.from_numpy((rng.random(tensor.numel()) < 0.05).astype(np.uint8))
        found.append((name, bits.view(tensor.dtype)))
    return found


def send(sender: WeightSender, receivers: Receivers, tensors: Named, version: int) -> list[Named]:
    """Send to all; return what each has staged."""
    manifest = build_manifest(tensors, policy_version=version, bucket_bytes=BUCKET_BYTES)
    futures = receivers.start(manifest)
    sender.send(manifest, tensors, timeout_s=20.0)
    return [[*future.result(timeout=60.0).tensors] for future in futures]


def same_bits(staged: Named, tensors: Named) -> bool:
    pairs = zip(staged, tensors, strict=True)
    return all(
        one == other and torch.equal(left.view(torch.uint8), right.view(torch.uint8))
        for (one, left), (other, right) in pairs
    )


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("has_base", [True, False])
def test_what_is_applied_is_what_was_encoded_whatever_the_bits_mean(itemsize, has_base):
    rng = np.random.default_rng(0)
    base, new = rng.integers(0, 256, (2, 6000), dtype=np.uint8)  # NaN and infinity among them
    held = base.copy()
    delta.apply(
        delta.encode(new, base if has_base else None, itemsize=itemsize), held, is_delta=has_base, itemsize=itemsize
    )
    assert held.tobytes() == new.tobytes()
    assert len(delta.encode(base, base, itemsize=itemsize)) < 60


def test_twenty_versions_are_bit_equal_with_losses_restarts_and_skipped_versions(sender, directory, written):
    rng = np.random.default_rng(1)
    tensors, version, receivers, num = weights(rng), 0, None, 0
    for turn in range(20):
        for _ in range(rng.integers(1, 4)):  # versions that nobody gets
            tensors, version = changed(tensors, rng), version + 1
        is_new = receivers is None or turn % 4 == 3
        if is_new:
            if receivers is not None:
                receivers.close()  # an engine is lost
            if turn % 8 == 7:  # so are the trainers
                sender.close()
                sender = WeightSender(backend="file", directory=directory, sends_deltas=True)
            num = 1 + turn % 3
            receivers = Receivers(sender.open([1] * num), [1] * num)
        written.clear()
        staged = send(sender, receivers, tensors, version)
        assert all(same_bits(each, tensors) for each in staged) and len(staged) == num
        assert not any(written) if is_new else all(written), "whole to a new group, else the difference"
    receivers.close()
    sender.close()


def test_two_senders_send_deltas_of_their_own_tensors(sender, directory):
    rng = np.random.default_rng(2)
    tensors = weights(rng)
    receivers = Receivers(sender.open([1], num_senders=2), [1])
    other = WeightSender(backend="file", directory=directory)
    other.join(*sender.sender_invitations)
    with ThreadPoolExecutor(1) as pool:
        for version in range(3):
            announced = build_manifest(tensors, policy_version=version, bucket_bytes=BUCKET_BYTES)
            entries = tuple(replace(each, sender=int(each.name > "a")) for each in announced.entries)
            manifest = WeightManifest(policy_version=version, entries=entries, bucket_bytes=BUCKET_BYTES)
            (future,) = receivers.start(manifest)
            its_share = pool.submit(other.send, manifest, tensors[1:], timeout_s=20.0)
            digest = sender.send(manifest, tensors[:1], timeout_s=20.0)
            assert digest == its_share.result(20.0) == future.result(20.0).digest
            assert same_bits([*future.result().tensors], tensors)
            tensors = changed(tensors, rng)
    receivers.close()
    other.close()


@pytest.mark.parametrize("where", [-1, 0.1, 0.5, 0.9])
def test_a_flipped_bit_is_found_and_the_next_update_is_whole(sender, monkeypatch, written, where):
    rng = np.random.default_rng(3)
    tensors = weights(rng)
    receivers = Receivers(sender.open([1]), [1])
    send(sender, receivers, tensors, 1)
    encode = delta.encode

    def flipped(new: np.ndarray, base: np.ndarray | None, *, itemsize: int) -> bytes:
        if where < 0:  # of the weights, before they are packed
            return encode(new ^ (np.arange(len(new)) == 8).astype(np.uint8), base, itemsize=itemsize)
        data = bytearray(encode(new, base, itemsize=itemsize))
        data[int(where * len(data))] ^= 4
        return bytes(data)

    with monkeypatch.context() as patched, pytest.raises(TransferError):
        patched.setattr(delta, "encode", flipped)
        send(sender, receivers, changed(tensors, rng), 2)
    written.clear()
    receivers.close()
    receivers = Receivers(sender.open([1]), [1])
    (staged,) = send(sender, receivers, tensors, 3)
    assert same_bits(staged, tensors) and not any(written)
    receivers.close()


def test_a_member_that_has_lost_its_memory_refuses_a_delta(sender):
    rng = np.random.default_rng(4)
    tensors = weights(rng)
    receivers = Receivers(sender.open([1]), [1])
    send(sender, receivers, tensors, 1)
    for memory in receivers._memories.values():
        memory.discard()
    with pytest.raises(TransferError, match="differs from update 1, which is not what is here"):
        send(sender, receivers, changed(tensors, rng), 2)
    receivers.close()


def test_what_gets_no_smaller_is_sent_whole(sender, written):
    rng = np.random.default_rng(5)
    receivers = Receivers(sender.open([1]), [1])
    for version in range(3):
        few = [("a", torch.from_numpy(rng.random(4).astype(np.float32)))]
        (staged,) = send(sender, receivers, few, version)
        assert same_bits(staged, few)
    assert written == [False] * 3
    receivers.close()
