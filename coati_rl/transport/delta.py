"""Encode what differs between two updates, bit for bit, and apply it to the older one.

The difference is the exclusive or of the bytes, with the first bytes of all numbers together, then the second ones:
what changes least is then zero over long stretches, which zstd takes away. Against nothing it is the whole update.
"""

from functools import cache
from typing import Any

import numpy as np

from coati_rl.errors import TransferError

_LEVEL = 1  # of zstd: higher ones gain nothing on differences that a fast one has not found


def encode(new: np.ndarray, base: np.ndarray | None, *, itemsize: int) -> bytes:
    """Return the difference of uint8[N] `new` to `base`, or the whole of it, compressed.

    Args:
        new: the bytes to be sent.
        base: uint8[N], what the receiver has proved to hold; None: nothing.
        itemsize: bytes of a number, of which N is a multiple.
    """
    difference = new if base is None else np.bitwise_xor(new, base)
    planes = np.ascontiguousarray(difference.reshape(-1, itemsize).T)
    data: bytes = _codec().compress(planes, asbytes=True)
    return data


def apply(data: bytes | memoryview, target: np.ndarray, *, is_delta: bool, itemsize: int) -> None:
    """Turn uint8[N] `target`, which holds the base if `is_delta`, into what was encoded.

    Raises: TransferError if the data cannot be unpacked to as many bytes. Digests tell whether the result is right.
    """
    try:
        unpacked = np.frombuffer(_codec().decompress(data, decompressed_size=target.nbytes), np.uint8)
    except OSError as error:
        raise TransferError(f"a difference of {target.nbytes} bytes cannot be unpacked: {error}") from error
    content = unpacked.reshape(itemsize, -1).T
    numbers = target.reshape(-1, itemsize)
    if is_delta:
        np.bitwise_xor(numbers, content, out=numbers)
    else:
        numbers[:] = content


@cache
def _codec() -> Any:
    import pyarrow  # half a second, which members without differences do not pay

    return pyarrow.Codec("zstd", compression_level=_LEVEL)
