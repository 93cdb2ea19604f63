"""Serialise one finished group for the ledger, in the fields of a checkpoint's untrained rollouts.

Length of a JSON description, the description, then token ids (int32[N]) and log-probabilities (float32[M]), each with
its first bytes together, then its second ones, ...: compressed they are a tenth smaller. Then the bytes of its routes,
if it has any.
"""

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from coati_rl.batching.packed_group import as_packed
from coati_rl.checkpoint.untrained_rollouts import describe_group, read_group, route_bytes
from coati_rl.types import Prompt, RolloutGroup

_LENGTHS = struct.Struct("<III")  # bytes of the description, N, M


def group_to_bytes(group: RolloutGroup) -> bytes:
    """Return the group without its prompt's content."""
    packed = as_packed(group)
    description = json.dumps(describe_group(group, packed), separators=(",", ":")).encode()
    lengths = _LENGTHS.pack(len(description), len(packed.token_ids), len(packed.logprobs))
    arrays = (packed.token_ids.astype("<i4"), packed.logprobs.astype("<f4"))
    return b"".join((lengths, description, *map(_bytes_apart, arrays), route_bytes(packed).tobytes()))


def group_from_bytes(data: bytes, *, lease_id: int, prompt_of: Callable[[str], Prompt]) -> RolloutGroup:
    """Parse what `group_to_bytes` wrote; the group gets `lease_id`.

    Raises: ValueError or KeyError if it cannot be parsed, or its prompt is not there.
    """
    num_description, num_tokens, num_logprobs = _LENGTHS.unpack_from(data)
    start = _LENGTHS.size + num_description
    middle = start + 4 * num_tokens
    end = middle + 4 * num_logprobs
    described: dict[str, Any] = json.loads(data[_LENGTHS.size : start])
    return read_group(
        described,
        prompt_of,
        token_ids=_together(data[start:middle], "<i4").astype(np.int32),
        logprobs=_together(data[middle:end], "<f4").astype(np.float32),
        lease_id=lease_id,
        routes=np.frombuffer(data[end:], np.uint8),
    )


def _bytes_apart(values: np.ndarray) -> bytes:
    """Return the bytes of numbers of four bytes, the first ones of all first."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, 4).T.tobytes()


def _together(data: bytes, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(4, -1).T).view(dtype).reshape(-1)
