"""Name, read, begin and delete the segments of a ledger: <run-dir>/ledger/segment-000001.ledger, ...

A segment begins with START, at the beginning of a run and of each resumption, or with CHECKPOINT, when a checkpoint is
taken. Segments before a START are void, those before a complete checkpoint's are deleted.
"""

import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coati_rl.checkpoint.ledger_frames import LedgerError, Record, encode_frame, intact_bytes, read_frames
from coati_rl.disk import flush

LEDGER = "ledger"  # in the run directory
START, CHECKPOINT = "start", "checkpoint"
_NAME = re.compile(r"segment-(\d{6,})\.ledger")


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Name a file of the ledger."""

    number: int  # from 1
    path: Path


def segment_of(directory: Path, number: int) -> Segment:
    """Return a segment by its number."""
    return Segment(number=number, path=directory / f"segment-{number:06d}.ledger")


def segments_in(directory: Path) -> list[Segment]:
    """Return the segments that are there, the oldest first; none if the directory is not there."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    numbers = sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))
    return [segment_of(directory, number) for number in numbers]


def last_number(directory: Path) -> int:
    """Return the number of the last segment; 0 if there is none."""
    return max((segment.number for segment in segments_in(directory)), default=0)


def read_ledger(directory: Path) -> Iterator[Record]:
    """Yield the records since the last START, or since the oldest segment that is left.

    The frame that a kill left unfinished at the end is left out; nothing is changed.

    Raises: LedgerError naming the file for damage anywhere else.
    """
    segments = _since_start(segments_in(directory))
    for place, segment in enumerate(segments):
        if segment.number != segments[0].number + place:
            raise LedgerError(f"{segment_of(directory, segment.number - 1).path} is missing")
        yield from _read(segment, is_last=place == len(segments) - 1)


def begin_segment(segment: Segment, records: Sequence[bytes]) -> int:
    """Write a segment of one frame, which is there as a whole or not at all. Returns: its bytes.

    Raises: OSError if it cannot be written.
    """
    segment.path.parent.mkdir(parents=True, exist_ok=True)
    partial = segment.path.with_name(f".{segment.path.name}.partial")
    frame = encode_frame(records, segment=segment.number, number=0)
    append(partial, frame, size=0)
    partial.replace(segment.path)
    flush(segment.path.parent)
    return len(frame)


def append(path: Path, frame: bytes, *, size: int, on_written: Callable[[], None] = lambda: None) -> None:
    """Append a frame to a file of `size` bytes, durably; a failed write is taken back as far as the disk lets it.

    Args:
        path: of the file.
        frame: to append.
        size: of the file.
        on_written: called when the system has the frame, so that this process's own end cannot take it away.
    Raises: OSError if it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if size == 0 else 0), 0o644)
    try:
        os.lseek(descriptor, size, os.SEEK_SET)
        rest = memoryview(frame)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            on_written()
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def first_record(segment: Segment) -> Record | None:
    """Return what a segment begins with; None if it is empty. Raises: LedgerError."""
    return next(_read(segment, is_last=True), None)


def cut_torn_frame(directory: Path) -> None:
    """Cut off the frame that a kill left unfinished, so that another segment can follow. Raises: as `read_ledger`."""
    if not (segments := segments_in(directory)):
        return
    last = segments[-1]
    with _named(last):
        end = intact_bytes(last.path.read_bytes(), segment=last.number)
        os.truncate(last.path, end)
        flush(last.path)  # its writer may have ended before its last fsync, and what follows is to be read after it


def delete_segments(directory: Path, *, before: int) -> None:
    """Delete the segments before a number, the oldest first: what is left has no gap."""
    for segment in segments_in(directory):
        if segment.number < before:
            segment.path.unlink(missing_ok=True)


def delete_ledger(directory: Path) -> None:
    """Delete all segments: of a run that goes on without a ledger."""
    for segment in segments_in(directory):
        segment.path.unlink(missing_ok=True)


def _since_start(segments: Sequence[Segment]) -> Sequence[Segment]:
    for place in reversed(range(len(segments))):
        first = first_record(segments[place])
        if first is not None and first.kind == START:
            return segments[place:]
    return segments


def _read(segment: Segment, *, is_last: bool) -> Iterator[Record]:
    with _named(segment):
        with segment.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        yield from read_frames(data, segment=segment.number, may_be_torn=is_last)


@contextmanager
def _named(segment: Segment) -> Iterator[None]:
    """Name the file in errors."""
    try:
        yield
    except (OSError, LedgerError) as error:
        raise LedgerError(f"{segment.path}: {error}") from error
