"""Test what is digested, packed and refused, whatever the size of a piece."""

import pytest
import torch
import xxhash

from coati_rl.errors import TransferError
from coati_rl.transport import checksum as passes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(dtype: torch.dtype, count: int = 1000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


@pytest.fixture(autouse=True, params=[64, 2**20])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, the last one shorter; or one."""
    monkeypatch.setattr(passes, "_PIECE_BYTES", request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_packed_is_the_source_and_every_pass_has_the_digest_of_its_bytes(dtype: torch.dtype) -> None:
    source, place = values(dtype), torch.zeros(1000, dtype=dtype)
    packed, digested, checked = xxhash.xxh3_128(), xxhash.xxh3_128(), xxhash.xxh3_128()
    passes.pack(source, place, packed)
    passes.digest(source, digested)
    passes.digest_and_check(source, checked, name="w")
    assert torch.equal(place, source)
    assert packed.digest() == digested.digest() == checked.digest() == xxhash.xxh3_128(raw(source)).digest()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("index", [0, 500, 999])
def test_what_is_not_finite_is_refused_by_name(dtype: torch.dtype, value: float, index: int) -> None:
    tensor = values(dtype)
    tensor[index] = value
    with pytest.raises(TransferError, match="tensor 'w' holds NaN or infinity"):
        passes.digest_and_check(tensor, xxhash.xxh3_128(), name="w")


@pytest.mark.parametrize("dtype", DTYPES)
def test_opposite_infinities_do_not_hide_each_other(dtype: torch.dtype) -> None:
    tensor = torch.tensor([float("inf"), float("-inf")], dtype=dtype)
    with pytest.raises(TransferError, match="tensor 'w' holds NaN or infinity"):
        passes.digest_and_check(tensor, xxhash.xxh3_128(), name="w")


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_numbers_whose_sum_is_not_are_let_through(dtype: torch.dtype) -> None:
    tensor, hasher = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype), xxhash.xxh3_128()
    assert not tensor.sum().isfinite()
    passes.digest_and_check(tensor, hasher, name="w")
    assert hasher.digest() == xxhash.xxh3_128(raw(tensor)).digest()
