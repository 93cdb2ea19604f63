"""Serialise one finished group for the ledger, in the fields of a checkpoint's untrained rollouts.

Length of a JSON description, the description, then token ids (int32[N]) and log-probabilities (float32[M]), each with
its first bytes together, then its second ones, ...: compressed they are a tenth smaller. Then the bytes of its routes,
if it has any. Trajectories and scores are columns in the description, field by field: a name is there once, and no
object is made of any of them.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from coati_rl.batching.packed_group import PackedTrajectory, as_packed
from coati_rl.checkpoint.ledger_frames import to_json
from coati_rl.checkpoint.untrained_rollouts import describe_group, read_group, route_bytes
from coati_rl.types import Prompt, RolloutGroup, Score

_LENGTHS = struct.Struct("<III")  # bytes of the description, N, M
_SCORE_FIELDS = tuple(field.name for field in fields(Score))
_score_values = attrgetter(*_SCORE_FIELDS)


def group_to_bytes(group: RolloutGroup) -> bytes:
    """Return the group without its prompt's content."""
    packed = as_packed(group)
    trajectories = _columns(PackedTrajectory._fields, packed.trajectories)
    scores = _columns(_SCORE_FIELDS, map(_score_values, packed.scores))
    described = describe_group(group, packed, trajectories=trajectories, scores=scores)
    description = to_json(described).encode()
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
    described |= {name: _rows(described[name]) for name in ("trajectories", "scores")}
    return read_group(
        described,
        prompt_of,
        token_ids=_together(data[start:middle], "<i4").astype(np.int32),
        logprobs=_together(data[middle:end], "<f4").astype(np.float32),
        lease_id=lease_id,
        routes=np.frombuffer(data[end:], np.uint8),
    )


def _columns(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return the values of each field, of rows that have them in the order of `names`."""
    return dict(zip(names, zip(*rows, strict=True), strict=False))  # without rows there are no columns


def _rows(columns: Mapping[str, Sequence[Any]]) -> Sequence[Mapping[str, Any]]:
    """Return what `_columns` took, row by row."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _bytes_apart(values: np.ndarray) -> bytes:
    """Return the bytes of numbers of four bytes, the first ones of all first."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, 4).T.tobytes()


def _together(data: bytes, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(4, -1).T).view(dtype).reshape(-1)
