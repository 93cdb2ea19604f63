"""Test what is digested, packed and refused, whatever the size of a piece."""

import pytest
import torch
import xxhash

from coati_rl.errors import TransferError
from coati_rl.transport import checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(dtype: torch.dtype, count: int = 1000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


@pytest.fixture(autouse=True, params=[64, 2**20])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, the last one shorter; or one."""
    monkeypatch.setattr(checksum, "_PIECE_BYTES", request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_packed_is_the_source_and_every_pass_has_the_digest_of_its_bytes(dtype: torch.dtype) -> None:
    source, place = values(dtype), torch.zeros(1000, dtype=dtype)
    packed, digested, checked = checksum.HostDigest(), checksum.HostDigest(), checksum.HostDigest()
    checksum.pack(source, place, packed)
    digested.add(source)
    checked.add_received(source, arrived=source, name="w")
    assert torch.equal(place, source)
    assert packed.bytes() == digested.bytes() == checked.bytes() == xxhash.xxh3_128(raw(source)).digest()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("index", [0, 500, 999])
def test_what_is_not_finite_is_refused_by_name(dtype: torch.dtype, value: float, index: int) -> None:
    tensor = values(dtype)
    tensor[index] = value
    with pytest.raises(TransferError, match="tensor 'w' holds NaN or infinity"):
        checksum.HostDigest().add_received(tensor, arrived=tensor, name="w")


@pytest.mark.parametrize("dtype", DTYPES)
def test_opposite_infinities_do_not_hide_each_other(dtype: torch.dtype) -> None:
    tensor = torch.tensor([float("inf"), float("-inf")], dtype=dtype)
    with pytest.raises(TransferError, match="tensor 'w' holds NaN or infinity"):
        checksum.HostDigest().add_received(tensor, arrived=tensor, name="w")


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_numbers_whose_sum_is_not_are_let_through(dtype: torch.dtype) -> None:
    tensor, digest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype), checksum.HostDigest()
    assert not tensor.sum().isfinite()
    digest.add_received(tensor, arrived=tensor, name="w")
    assert digest.bytes() == xxhash.xxh3_128(raw(tensor)).digest()


class LateCopies:
    """Copies that are made when they are waited for, as late as a GPU may make them; `order` says when."""

    def __init__(self, order: list[str]) -> None:
        self.order, self.buffers, self.waiting = order, [torch.zeros(64, dtype=torch.uint8) for _ in range(2)], {}

    def start(self, slot: int, piece: torch.Tensor) -> torch.Tensor:
        assert slot not in self.waiting, "the buffer holds a piece that is not in the digest"
        self.order.append(f"start {slot}")
        self.waiting[slot] = piece
        return self.buffers[slot][: piece.numel()]

    def wait(self, slot: int) -> None:
        self.order.append(f"wait {slot}")
        piece = self.waiting.pop(slot)
        self.buffers[slot][: piece.numel()] = torch.Tensor.cpu(piece)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda", 0)


def test_bytes_of_a_gpu_are_digested_through_two_buffers_while_the_next_piece_is_copied(monkeypatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(checksum, "PinnedCopies", lambda device: LateCopies(order))
    monkeypatch.setattr(checksum, "_PINNED_BYTES", 64)
    tensors, digest = (
        [values(torch.float32, count) for count in (40, 1, 16)],
        checksum.HostDigest(),
    )  # 3, 1 and 1 pieces
    for tensor in tensors:
        digest.add(tensor.as_subclass(OnGpu))
    on_host = values(torch.float16, 3)
    digest.add(on_host)  # behind those that are still being copied
    expected = xxhash.xxh3_128(b"".join(map(raw, [*tensors, on_host]))).digest()
    assert digest.bytes() == digest.bytes() == expected
    assert order == [
        "start 0", "start 1", "wait 0", "start 0", "wait 1", "start 1", "wait 0", "start 0", "wait 1", "wait 0",
    ]  # fmt: skip
