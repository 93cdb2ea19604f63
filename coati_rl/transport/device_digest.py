"""Digest an update where it is: sums of products of its words with fixed random keys, computed by integer operations.

    row r of a part: s_l(r) = sum_i w(r, i) * k_l(i)  mod 2^64,  l = 1, 2

w are signed 32-bit words, k 64-bit keys, the same for every row of 2^16 words. The digest is xxh3-128 over the sizes of
all parts and the sums, piece by piece: those with the first keys, then those with the second. Two rows that differ have
equal sums with a probability of at most 2^-32 for each l (multilinear hashing: Lemire and Kaser, "Strongly universal
string hashing is fast", 2014), and integers give the same sums on every device. Unlike the host's, this digest depends
on the size of buckets, which cut a tensor in parts; all members of a group have the same.
"""

from functools import cache

import numpy as np
import torch
import xxhash

from coati_rl.transport.checksum import check_finite

_ROW_WORDS = 2**16
_PIECE_WORDS = 2**22  # whose products, twice their bytes, stay in a GPU's cache
_WORD_BYTES = 4
_NUM_SUMS = 2


class DeviceDigest:
    """Implement `Digest` on the device of the tensors, without waiting for it before the end."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []  # int64[rows] each
        self._sizes: list[int] = []  # of the parts, in bytes
        self._received: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # see `check_finite`

    def add(self, tensor: torch.Tensor) -> None:
        self._sizes.append(tensor.nbytes)
        for piece in torch.split(_words(tensor), _PIECE_WORDS):
            whole = piece.numel() // _ROW_WORDS * _ROW_WORDS
            for keys in _keys(piece.device):
                if whole:
                    self._sums.append((piece[:whole].view(-1, _ROW_WORDS) * keys).sum(1))
                if rest := piece.numel() - whole:
                    self._sums.append((piece[whole:] * keys[:rest]).sum().view(1))

    def add_received(self, tensor: torch.Tensor, *, arrived: torch.Tensor, name: str) -> None:
        self.add(tensor)
        self._received.append((name, arrived, arrived.sum()))

    def bytes(self) -> bytes:
        """See `Digest.bytes`. Raises: TransferError for NaN or infinity in what was received."""
        hasher = xxhash.xxh3_128(np.asarray(self._sizes, dtype=np.int64).tobytes())
        if self._sums:
            hasher.update(torch.cat(self._sums).cpu().numpy().data)
        check_finite(self._received)
        return hasher.digest()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return int32[N], the bytes of one-dimensional `tensor`, with zeros up to a whole word."""
    data = tensor.view(torch.uint8)
    if data.numel() % _WORD_BYTES or data.data_ptr() % _WORD_BYTES:
        aligned = data.new_zeros(-(-data.numel() // _WORD_BYTES) * _WORD_BYTES)
        aligned[: data.numel()] = data
        data = aligned
    return data.view(torch.int32)


@cache
def _keys(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return int64[_ROW_WORDS] for each sum: splitmix64 of the numbers from 1."""
    values = np.arange(1, _NUM_SUMS * _ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys = torch.from_numpy((values ^ (values >> np.uint64(31))).view(np.int64)).to(device)
    return keys[:_ROW_WORDS], keys[_ROW_WORDS:]
