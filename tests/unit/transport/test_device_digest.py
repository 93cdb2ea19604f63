"""Test the digest that GPUs compute: its definition, and what it tells apart."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import xxhash

from coati_rl.errors import TransferError
from coati_rl.transport.device_digest import DeviceDigest

ROW_BYTES = 4 * 2**16


def digest_of(parts: Sequence[torch.Tensor]) -> bytes:
    digest = DeviceDigest()
    for part in parts:
        digest.add(part)
    return digest.bytes()


def data(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(num_bytes), dtype=torch.uint8)


def splitmix64(number: int) -> int:
    value = number * 0x9E3779B97F4A7C15 % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def test_it_is_the_digest_of_sums_as_defined() -> None:
    parts = [data(10), data(ROW_BYTES + 8)]
    sums: list[int] = []
    for part in parts:
        words = np.frombuffer(part.numpy().tobytes() + bytes(-len(part) % 4), dtype=np.int32).tolist()
        rows = [words[begin : begin + 2**16] for begin in range(0, len(words), 2**16)]
        whole, rest = [row for row in rows if len(row) == 2**16], [row for row in rows if len(row) < 2**16]
        for which in range(2):
            keys = [splitmix64(which * 2**16 + 1 + place) for place in range(2**16)]
            sums += [sum(word * key for word, key in zip(row, keys, strict=False)) % 2**64 for row in whole + rest]
    sizes = np.asarray([10, ROW_BYTES + 8], dtype=np.int64)
    assert digest_of(parts) == xxhash.xxh3_128(sizes.tobytes() + np.asarray(sums, dtype=np.uint64).tobytes()).digest()


@pytest.mark.parametrize("num_bytes", [1, 2, 4, 6, 1000, ROW_BYTES - 2, ROW_BYTES, 3 * ROW_BYTES + 2])
def test_one_bit_anywhere_and_bytes_that_are_moved_or_missing_are_noticed(num_bytes: int) -> None:
    part = data(num_bytes)
    others = [part[:-1], torch.cat([part, part.new_zeros(1)])]
    for place in {0, num_bytes // 2, num_bytes - 1}:
        for bit in range(8):
            others.append(part.clone())
            others[-1][place] ^= 1 << bit
    if num_bytes >= 6:
        others += [part.roll(2), part.flip(0)]
    if num_bytes > 2 * ROW_BYTES:
        rows = part[: 2 * ROW_BYTES].view(2, -1)
        others.append(torch.cat([rows.flip(0).flatten(), part[2 * ROW_BYTES :]]))
    digests = {digest_of([part]), *(digest_of([other]) for other in others)}
    assert len(digests) == 1 + len(others)


def test_highest_bits_of_two_words_do_not_hide_each_other() -> None:
    part = data(ROW_BYTES)
    other = part.clone()
    other[[3, 4003]] ^= 128
    assert digest_of([part]) != digest_of([other])


def test_it_depends_on_the_order_and_the_cuts_of_tensors() -> None:
    first, second = data(ROW_BYTES), data(5 * ROW_BYTES + 12)
    digest = digest_of([first, second])
    assert digest == digest_of([first.clone(), second.clone()])
    assert digest not in (digest_of([second, first]), digest_of([torch.cat([first, second])]))


def test_bytes_that_begin_within_a_word_are_those_of_a_copy() -> None:
    whole = data(2 * ROW_BYTES)
    for begin in (1, 2, 3):
        assert digest_of([whole[begin : begin + 1000]]) == digest_of([whole[begin : begin + 1000].clone()])
    halves = whole.view(torch.bfloat16)[1:1001]
    assert digest_of([halves]) == digest_of([halves.clone()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_refused_by_name_at_the_end(dtype: torch.dtype) -> None:
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)  # whose sum is not finite
    right, wrong = DeviceDigest(), DeviceDigest()
    for digest in (right, wrong):
        digest.add_received(largest, arrived=largest, name="large")
    assert right.bytes() == digest_of([largest])
    for values in ([1.0, float("nan")], [float("inf"), float("-inf")]):
        tensor = torch.tensor(values, dtype=dtype)
        wrong.add_received(tensor, arrived=tensor, name="w")
        with pytest.raises(TransferError, match="tensor 'w' holds NaN or infinity"):
            wrong.bytes()
