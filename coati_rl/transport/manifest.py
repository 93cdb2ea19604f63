"""Describe a weight update: names, dtypes and shapes in transfer order, and their division into buckets.

Built from tensors' names and metadata; sent as JSON, never pickled. Both ends compute the same buckets from it.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch

from coati_rl.errors import TransferError

ALIGNMENT = 16  # bytes; every dtype may be viewed at such an offset
DEFAULT_BUCKET_BYTES = 32 * 2**20  # fastest measured end to end; larger ones cost page faults, smaller ones add calls
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Describe one tensor: its Hugging Face name, dtype, shape and sender."""

    name: str
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    sender: int = 0  # group rank

    def __post_init__(self) -> None:
        if not self.name:
            raise TransferError("manifest: a tensor has no name")
        if self.dtype not in DTYPES:
            raise TransferError(f"manifest: tensor {self.name!r} has dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        if any(size < 1 for size in self.shape):
            raise TransferError(f"manifest: tensor {self.name!r} has shape {self.shape}; sizes must be positive")
        if self.sender < 0:
            raise TransferError(f"manifest: tensor {self.name!r} has sender {self.sender}; the first one is 0")

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes, without padding."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketItem:
    """Locate a tensor, or a part of one that is larger than a bucket, in a bucket."""

    entry: TensorEntry
    offset: int  # bytes, a multiple of ALIGNMENT
    begin: int = 0  # bytes of the tensor before this part
    num_bytes: int  # of this part

    @property
    def num_parts(self) -> int:
        """Return the parts of the tensor, in consecutive buckets; valid on the first one, the largest."""
        return -(-self.entry.num_bytes // self.num_bytes)

    def flat(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the elements of this part as a view of the bucket's `buffer`, uint8[N]; one dimension."""
        return buffer[self.offset : self.offset + self.num_bytes].view(DTYPES[self.entry.dtype])

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this part of the whole tensor's elements; one dimension."""
        size = DTYPES[self.entry.dtype].itemsize
        return flat[self.begin // size : (self.begin + self.num_bytes) // size]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Group consecutive tensors of one sender that are sent as one flat byte buffer."""

    items: tuple[BucketItem, ...]
    num_bytes: int  # with padding

    @property
    def sender(self) -> int:
        """Return the group rank that broadcasts it."""
        return self.items[0].entry.sender

    @property
    def itemsize(self) -> int:
        """Return the bytes of a number; of mixed buckets those of the first, by which a delta is as right."""
        return DTYPES[self.items[0].entry.dtype].itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightManifest:
    """Announce one update."""

    policy_version: int
    entries: tuple[TensorEntry, ...]  # in transfer order, which is the Hugging Face order
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    base: str = ""  # identity of the weights that these tensors are adapters of; empty: these are all weights

    def __post_init__(self) -> None:
        if self.policy_version < 0:
            raise TransferError(f"manifest: policy_version {self.policy_version} is negative")
        if self.bucket_bytes < ALIGNMENT:
            raise TransferError(f"manifest: bucket_bytes {self.bucket_bytes} is below {ALIGNMENT}")
        if not self.entries:
            raise TransferError("manifest: no tensors")
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise TransferError(f"manifest: tensor {entry.name!r} is listed twice")
            seen.add(entry.name)

    @property
    def total_bytes(self) -> int:
        """Return the size of all tensors in bytes, without padding."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def num_senders(self) -> int:
        """Return the number of group ranks, from 0, that may send; all but the last may have nothing to send."""
        return 1 + max(entry.sender for entry in self.entries)

    def buckets(self) -> tuple[Bucket, ...]:
        """Cut where the sender changes, and else into at most `bucket_bytes`.

        A tensor that is larger gets buckets of its own, which hold its parts one after the other without padding.
        """
        buckets: list[Bucket] = []
        items: list[BucketItem] = []
        offset, most = 0, self.bucket_bytes // ALIGNMENT * ALIGNMENT
        for entry in self.entries:
            for begin in range(0, entry.num_bytes, most):
                num_bytes = min(most, entry.num_bytes - begin)
                padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
                is_part = num_bytes < entry.num_bytes
                is_full = offset + padded > most or is_part or (items and items[-1].begin > 0)
                if items and (entry.sender != items[-1].entry.sender or is_full):
                    buckets.append(Bucket(items=tuple(items), num_bytes=offset))
                    items, offset = [], 0
                items.append(BucketItem(entry=entry, offset=offset, begin=begin, num_bytes=num_bytes))
                offset += padded
        buckets.append(Bucket(items=tuple(items), num_bytes=offset))
        return tuple(buckets)

    @property
    def num_staged_bytes(self) -> int:
        """Return the size of all buckets in bytes, with padding."""
        return sum(bucket.num_bytes for bucket in self.buckets())

    def tensors(self, memory: torch.Tensor) -> tuple[tuple[str, torch.Tensor], ...]:
        """Return all tensors by name, views of `memory`, uint8[num_staged_bytes], where buckets are consecutive."""
        buckets = self.buckets()
        begins = [0, *accumulate(bucket.num_bytes for bucket in buckets)]
        return staged_tensors(buckets, lambda index, count: memory[begins[index] : begins[index + count]])

    def to_json(self) -> str:
        """Return one line of JSON."""
        entries = [[entry.name, entry.dtype, list(entry.shape), entry.sender] for entry in self.entries]
        fields = {"policy_version": self.policy_version, "bucket_bytes": self.bucket_bytes, "base": self.base}
        return json.dumps({**fields, "entries": entries})

    @staticmethod
    def from_json(text: str) -> "WeightManifest":
        """Parse what `to_json` wrote. Raises: TransferError on anything else."""
        types = {"policy_version": int, "bucket_bytes": int, "base": str, "entries": list}
        fields = parse_object(text, types, what="manifest")
        return WeightManifest(
            policy_version=fields["policy_version"],
            bucket_bytes=fields["bucket_bytes"],
            base=fields["base"],
            entries=tuple(_parse_entry(entry) for entry in fields["entries"]),
        )


def staged_tensors(
    buckets: Sequence[Bucket], memory: Callable[[int, int], torch.Tensor]
) -> tuple[tuple[str, torch.Tensor], ...]:
    """Return the tensors of `buckets` by name, in order, as views.

    Args:
        buckets: of an update.
        memory: returns the memory of consecutive buckets of a sender, uint8[N], given the first one and their number.
    """
    found = []
    for index, bucket in enumerate(buckets):
        for item in bucket.items:
            if item.begin == 0:
                entry = item.entry
                its_bytes = memory(index, item.num_parts)[item.offset : item.offset + entry.num_bytes]
                found.append((entry.name, its_bytes.view(DTYPES[entry.dtype]).view(entry.shape)))
    return tuple(found)


def build_manifest(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    policy_version: int,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> WeightManifest:
    """Announce these tensors of rank 0 in this order; they may be on the meta device."""
    return WeightManifest(
        policy_version=policy_version,
        entries=tuple(
            TensorEntry(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
            for name, tensor in named_tensors
        ),
        bucket_bytes=bucket_bytes,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def parse_object(text: str, types: dict[str, type], *, what: str) -> dict[str, Any]:
    """Parse a JSON object with exactly these fields. Raises: TransferError naming the field that is wrong."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise TransferError(f"{what}: not JSON: {error}") from error
    if not isinstance(fields, dict) or fields.keys() != types.keys():
        found = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        raise TransferError(f"{what}: expected the fields {sorted(types)}, got {found}")
    for name, expected in types.items():
        if type(fields[name]) is not expected:  # isinstance would take True for an int
            raise TransferError(f"{what}: field {name} is {fields[name]!r}, not of type {expected.__name__}")
    return fields


def _parse_entry(entry: Any) -> TensorEntry:
    match entry:
        case [str(name), str(dtype), [*shape], sender] if all(type(number) is int for number in [*shape, sender]):
            return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), sender=sender)
    raise TransferError(f"manifest: expected [name, dtype, shape, sender], got {entry!r}")
