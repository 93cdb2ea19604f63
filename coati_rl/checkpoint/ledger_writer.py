"""Append records to a ledger in a thread of its own, and make them durable in batches.

Consumes: records, and the orders to begin a segment or to delete earlier ones. Waits for: the batch, at most half a
second, less if somebody waits for a record. Is unblocked by: `append`, `wait_written`, `wait_durable`. Produces:
frames, each durable before the next one is begun. A frame is written before it is durable: then it outlives this
process, though not the machine. With `keep_state` each batch ends with the state that its records have led to.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from coati_rl.checkpoint.ledger_files import (
    CHECKPOINT,
    append,
    begin_segment,
    cut_torn_frame,
    delete_segments,
    first_record,
    last_number,
    segment_of,
    segments_in,
)
from coati_rl.checkpoint.ledger_frames import encode_frame
from coati_rl.disk import disk_errors
from coati_rl.errors import RunError
from coati_rl.observability.background_writer import BackgroundWriter

logger = logging.getLogger(__name__)

BATCH_S = 0.5  # for which records are gathered; with the time of a write, the most that a power cut can take
_MAX_BYTES_QUEUED = 2**25  # of groups: half a second's work of one core
_FRAME_BYTES = 2**24  # of records, before compression; a batch of more has several frames

Encode = Callable[[], bytes]  # encodes a record, in the writer's thread


class LedgerWriter:
    """Write the ledger of a run; all methods may be called from any thread."""

    def __init__(self, directory: Path, *, max_bytes: int | None = None, batch_s: float = BATCH_S) -> None:
        """Take the directory, and the bytes past which groups are no longer written; None: without a limit."""
        self.directory = directory
        self._max_bytes, self._batch_s = max_bytes, batch_s
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # of those that wait for a record: hundreds of producers commit
        self._asked = threading.Condition(lock)  # of the writer's thread
        self._has_room = threading.Condition(lock)  # of those that have a group: one is let in after the other
        self._orders: list[Callable[[], None]] = []
        self._bytes_queued = 0  # of groups, before they are encoded
        self._num_appended = self._num_taken = self._num_written = self._num_durable = 0
        self._is_urgent = self._is_queued = False
        self._writer = BackgroundWriter(self._wake, name="ledger")
        self._state_lock: AbstractContextManager[object] = nullcontext()
        self._describe: Callable[[], Encode] | None = None
        # Of the writer's thread.
        self._segment = segment_of(directory, last_number(directory))
        self._batch: list[bytes] = []
        self._batch_bytes = self._num_frames = self._num_frames_written = 0  # of the segment, and in all
        self._size = 0  # of the segment
        self._size_before = 0  # of earlier ones that are still there
        self._begun_for: dict[int, int] = {}  # step of a checkpoint -> its segment
        self._is_full = False

    @property
    def problem(self) -> str | None:
        """Return why the ledger can no longer be written; None while it can."""
        return self._writer.problem

    @property
    def num_appended(self) -> int:
        """Return the number of the last record, from 1."""
        return self._num_appended

    @property
    def num_durable(self) -> int:
        """Return the number of the last record that is on the disk."""
        return self._num_durable

    def keep_state(self, describe: Callable[[], Encode], lock: AbstractContextManager[object]) -> None:
        """End each batch with a record of the state.

        Args:
            describe: returns what encodes it; called under `lock`.
            lock: under which the state changes and records are appended, so that a batch's state is that of its last
                record.
        """
        self._describe, self._state_lock = describe, lock

    def take_over(self, encode: list[Encode]) -> None:
        """Go on with what another writer, which has ended, has left: its segments stay, another one follows.

        Args:
            encode: the first records of that segment.
        """
        cut_torn_frame(self.directory)
        for segment in segments_in(self.directory):
            first = first_record(segment)
            if first is not None and first.kind == CHECKPOINT:
                self._begun_for[first.fields["step"]] = segment.number
            self._size_before += segment.path.stat().st_size
        self._order(lambda: self._begin_segment(encode))

    def append(self, encode: Encode, *, group_bytes: int = 0) -> int:
        """Add a record, of a group if `group_bytes` says how large its arrays are. Returns: its number."""
        return self._order(lambda: self._add(encode, group_bytes=group_bytes), group_bytes=group_bytes)

    def note_change(self) -> int:
        """Have the state written, without a record. Returns: a number as of a record."""
        return self._order(lambda: None)

    def begin(self, encode: list[Encode], *, is_start: bool = False, step: int = 0) -> int:
        """Begin a segment with these records, of a run's start or of a checkpoint. Returns: the number of the last one.

        Args:
            encode: its records, the first of which says of what it is.
            is_start: earlier segments are deleted when it is written.
            step: of the checkpoint, for `drop_before`.
        """
        return self._order(lambda: self._begin(encode, is_start=is_start, step=step))

    def drop_before(self, step: int) -> None:
        """Delete the segments before that of a checkpoint, which is complete."""
        self._order(lambda: self._drop_before(step))

    def wait_written(self, number: int, *, timeout_s: float) -> None:
        """Wait until a record outlives this process. Raises: RunError if it cannot be written, or is not in time."""
        self._wait_for(number, lambda: self._num_written, timeout_s)

    def wait_durable(self, number: int, *, timeout_s: float) -> None:
        """Wait until a record is on the disk. Raises: RunError if it cannot be written, or is not in time."""
        self._wait_for(number, lambda: self._num_durable, timeout_s)

    def flush(self, *, timeout_s: float) -> None:
        """Wait for all records; see `wait_durable`."""
        self.wait_durable(self._num_appended, timeout_s=timeout_s)

    @contextmanager
    def room(self, num_bytes: int, *, timeout_s: float) -> Iterator[None]:
        """Wait, at most so long, while more groups are queued than are soon written; append groups in the block."""
        with self._has_room:
            self._has_room.wait_for(lambda: self._bytes_queued < _MAX_BYTES_QUEUED or bool(self.problem), timeout_s)
            self._bytes_queued += num_bytes
        try:
            yield
        finally:
            self._make_room(num_bytes)

    def _wait_for(self, number: int, reached: Callable[[], int], timeout_s: float) -> None:
        with self._changed:
            if number > self._num_taken:  # else it is being written, and the next batch need not hurry
                self._is_urgent = True
                self._asked.notify_all()
            is_there, num_frames = False, -1
            while not is_there and num_frames != self._num_frames_written:  # a frame was written meanwhile
                num_frames = self._num_frames_written
                is_there = self._changed.wait_for(lambda: reached() >= number or bool(self.problem), timeout_s)
        if self.problem is not None:
            raise RunError(self.problem)
        if not is_there:
            raise RunError(f"{self.directory}: a record is not written after {timeout_s:g} s; check that disk")

    def _order(self, order: Callable[[], None], *, group_bytes: int = 0) -> int:
        with self._changed:
            self._bytes_queued += group_bytes
            self._orders.append(order)
            self._num_appended += 1
            number, is_new, self._is_queued = self._num_appended, not self._is_queued, True
        if is_new:
            self._writer.submit(self._write_batch)
        return number

    def _make_room(self, num_bytes: int) -> None:
        with self._has_room:
            self._bytes_queued -= num_bytes
            self._has_room.notify()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            self._has_room.notify_all()

    # --- in the writer's thread ------------------------------------------------------------------------------------

    def _write_batch(self) -> None:
        with self._asked:
            self._asked.wait_for(lambda: self._is_urgent, self._batch_s)
        with self._state_lock:
            encode_state = None if self._describe is None else self._describe()
            with self._changed:
                orders, self._orders = self._orders, []
                number = self._num_taken = self._num_appended
                self._is_urgent = self._is_queued = False
        with disk_errors(self._segment.path):
            for order in orders:
                order()
            if encode_state is not None:
                self._batch.append(encode_state())
            self._write_frame(lambda: self._written(number))
        with self._changed:
            self._num_written = self._num_durable = number
            self._changed.notify_all()

    def _written(self, number: int) -> None:
        with self._changed:
            self._num_written = number
            self._changed.notify_all()

    def _add(self, encode: Encode, *, group_bytes: int) -> None:
        if group_bytes:
            self._make_room(group_bytes)
        size = self._size_before + self._size + self._batch_bytes
        if group_bytes and self._max_bytes is not None and size >= self._max_bytes:
            if not self._is_full:
                self._is_full = True
                logger.warning(
                    "%s has reached --ledger-max-gb: until the next checkpoint rollouts are not written to it",
                    self.directory,
                )
            return
        record = encode()
        self._batch.append(record)
        self._batch_bytes += len(record)
        if self._batch_bytes >= _FRAME_BYTES:
            self._write_frame()

    def _write_frame(self, on_written: Callable[[], None] = lambda: None) -> None:
        if not self._batch:
            return
        frame = encode_frame(self._batch, segment=self._segment.number, number=self._num_frames)
        append(self._segment.path, frame, size=self._size, on_written=on_written)
        self._size += len(frame)
        self._num_frames += 1
        self._num_frames_written += 1
        self._batch, self._batch_bytes = [], 0

    def _begin(self, encode: list[Encode], *, is_start: bool, step: int) -> None:
        self._begin_segment(encode)
        self._begun_for[step] = self._segment.number
        if is_start:
            self._size_before = 0
            delete_segments(self.directory, before=self._segment.number)

    def _begin_segment(self, encode: list[Encode]) -> None:
        self._write_frame()
        segment = segment_of(self.directory, self._segment.number + 1)
        size = begin_segment(segment, [each() for each in encode])
        self._size_before += self._size
        self._segment, self._size, self._num_frames = segment, size, 1

    def _drop_before(self, step: int) -> None:
        if (number := self._begun_for.get(step)) is None:
            return
        self._write_frame()
        delete_segments(self.directory, before=number)
        self._begun_for = {at: begun for at, begun in self._begun_for.items() if begun >= number}
        kept = [each for each in segments_in(self.directory) if each.number < self._segment.number]
        self._size_before = sum(each.path.stat().st_size for each in kept)
        self._is_full = False
