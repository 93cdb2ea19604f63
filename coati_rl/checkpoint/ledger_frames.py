"""Frame records of the ledger: a header with numbers, length and checksums, then records compressed together.

A frame is 32 bytes of header, little-endian (magic, segment, frame, length of the payload, checksum of the payload,
checksum of the header before it; xxh3, 64 bits), and the payload: zstd of `record`s one after another (zlib in frames
of an earlier version). A writer begins a frame when the one before is durable, so that a kill or a power cut can damage
the last frame of the last segment and no other.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
import zstandard

_MAGIC = b"CRL1"
_HEADER = struct.Struct("<4sIIIQ")
_CHECKSUM = struct.Struct("<Q")
_LENGTHS = struct.Struct("<II")  # of a record's fields and body
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode  # that check takes a quarter of its time
_LEVEL = 1  # of zstd


class LedgerError(ValueError):
    """Report that a ledger cannot be used; the message names the file and the place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Hold a decision of the coordinator, or a finished group."""

    kind: str
    fields: Mapping[str, Any]  # JSON
    body: bytes = b""  # of a group, see `ledger_groups`

    def to_bytes(self) -> bytes:
        """Return the record with its lengths."""
        fields = to_json({"kind": self.kind, **self.fields}).encode()
        return b"".join((_LENGTHS.pack(len(fields), len(self.body)), fields, self.body))


def encode_frame(records: Sequence[bytes], *, segment: int, number: int) -> bytes:
    """Return a frame of encoded records.

    Args:
        records: at least one, at most 4 GiB together.
        segment: number of the file.
        number: of the frame in it, from 0.
    """
    payload = zstandard.compress(b"".join(records), _LEVEL)
    header = _HEADER.pack(_MAGIC, segment, number, len(payload), xxhash.xxh3_64_intdigest(payload))
    return b"".join((header, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header)), payload))


def read_frames(data: bytes | memoryview, *, segment: int, may_be_torn: bool) -> Iterator[Record]:
    """Yield the records of a segment.

    Args:
        data: of the whole file.
        segment: its number.
        may_be_torn: True for the last segment, whose last frame is left out if it is damaged.
    Raises: LedgerError for a damaged frame that is not the last one.
    """
    for _, payload in _payloads(memoryview(data), segment=segment, may_be_torn=may_be_torn):
        is_zstd = payload[: len(zstandard.FRAME_HEADER)] == zstandard.FRAME_HEADER
        yield from _records((zstandard.decompress if is_zstd else zlib.decompress)(payload))


def intact_bytes(data: bytes | memoryview, *, segment: int) -> int:
    """Return the length of the intact frames of the last segment. Raises: as `read_frames`."""
    return max((end for end, _ in _payloads(memoryview(data), segment=segment, may_be_torn=True)), default=0)


def _payloads(data: memoryview, *, segment: int, may_be_torn: bool) -> Iterator[tuple[int, memoryview]]:
    """Yield the end of each frame, and its payload."""
    start, number = 0, 0
    while start < len(data):
        payload = _payload_at(data, start, segment=segment, number=number)
        if payload is None:
            if may_be_torn and not _has_frame(data, start + 1, segment=segment, after=number):
                return
            raise LedgerError(
                f"frame {number}, at byte {start} of {len(data)}, is damaged, and not by the end of a run"
            )
        start, number = start + HEADER_BYTES + len(payload), number + 1
        yield start, payload


def _payload_at(data: memoryview, start: int, *, segment: int, number: int) -> memoryview | None:
    """Return the payload of the frame that begins at `start`; None if it is damaged, or not this frame."""
    header = _header_at(data, start)
    if header is None or header[:2] != (segment, number):
        return None
    _, _, length, checksum = header
    payload = data[start + HEADER_BYTES : start + HEADER_BYTES + length]
    return payload if len(payload) == length and xxhash.xxh3_64_intdigest(payload) == checksum else None


def _header_at(data: memoryview, start: int) -> tuple[int, int, int, int] | None:
    """Return segment, number, length and checksum of the payload; None without an intact header."""
    header = data[start : start + _HEADER.size]
    checksum = data[start + _HEADER.size : start + HEADER_BYTES]
    if len(checksum) < _CHECKSUM.size or _CHECKSUM.unpack(checksum)[0] != xxhash.xxh3_64_intdigest(header):
        return None
    magic, *values = _HEADER.unpack(header)
    return tuple(values) if magic == _MAGIC else None


def _has_frame(data: memoryview, start: int, *, segment: int, after: int) -> bool:
    """Return True if the header of a later frame follows: what is before it was durable once."""
    rest = bytes(data[start:])
    place = rest.find(_MAGIC)
    while place >= 0:
        header = _header_at(data, start + place)
        if header is not None and header[0] == segment and header[1] > after:
            return True
        place = rest.find(_MAGIC, place + 1)
    return False


def _records(payload: bytes) -> Iterator[Record]:
    start = 0
    while start < len(payload):
        num_fields, num_body = _LENGTHS.unpack_from(payload, start)
        start += _LENGTHS.size
        fields = json.loads(payload[start : start + num_fields])
        start += num_fields
        yield Record(kind=fields.pop("kind"), fields=fields, body=payload[start : start + num_body])
        start += num_body
