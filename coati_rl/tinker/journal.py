"""Append records to a file that survives a kill: each has a length and a checksum, and is on disk before it counts.

Consumes: records of any coroutine. Waits for: records. Is unblocked by: `close`. Records that wait together are written
by one fsync. What a kill left of a last record is cut off at the next start, and kept beside the journal.
"""

import asyncio
import json
import logging
import os
import queue
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati_rl.disk import disk_errors, flush

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<4sIQI")  # mark, bytes of the JSON, bytes of the body, CRC-32 of both
_MARK = b"CoTj"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Hold a JSON object, and bytes."""

    fields: Mapping[str, Any]
    body: bytes = b""


@dataclass(kw_only=True, slots=True)
class _Batch:
    """Hold what is to be written: a record, or all that a new file begins with; and who waits for it."""

    data: bytes
    begins_file: bool
    done: "asyncio.Future[None] | None"
    loop: "asyncio.AbstractEventLoop | None"


def read_journal(path: Path) -> Iterator[Record]:
    """Yield a file's records, and cut off what follows the last whole one. Raises: RunError."""
    if not path.exists():
        return
    with disk_errors(path), path.open("r+b") as file:
        size, end = os.fstat(file.fileno()).st_size, 0
        while (record := _read_record(file, size - end)) is not None:
            end = file.tell()
            yield record
        if end < size:
            file.seek(end)
            torn = path.with_name(f"{path.name}.torn-{end}")
            torn.write_bytes(file.read())
            logger.warning("%s: the last %d bytes are no whole record; kept as %s", path, size - end, torn.name)
            file.truncate(end)
            os.fsync(file.fileno())


def _read_record(file: Any, left: int) -> Record | None:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    mark, fields_size, body_size, checksum = _HEAD.unpack(head)
    if mark != _MARK or _HEAD.size + fields_size + body_size > left:
        return None
    fields, body = file.read(fields_size), file.read(body_size)
    if zlib.crc32(body, zlib.crc32(fields)) != checksum:
        return None
    return Record(fields=json.loads(fields), body=body)


def _packed(record: Record) -> bytes:
    fields = json.dumps(record.fields, separators=(",", ":")).encode()
    checksum = zlib.crc32(record.body, zlib.crc32(fields))
    return _HEAD.pack(_MARK, len(fields), len(record.body), checksum) + fields + record.body


class Journal:
    """Write records to a file on a thread of its own."""

    def __init__(self, path: Path) -> None:
        """Append to what is there; read it first. Raises: RunError if it cannot be opened."""
        self.path = path
        self.num_bytes = path.stat().st_size if path.exists() else 0
        with disk_errors(path):
            self._file = path.open("ab")
        self.failure: OSError | None = None
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    async def append(self, record: Record) -> None:
        """Write a record; returns when it is on disk. Raises: OSError."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._put(_packed(record), done=done, loop=loop)
        await done

    def append_soon(self, record: Record) -> None:
        """Write a record that may be lost in a kill."""
        self._put(_packed(record))

    def rewrite(self, records: Iterable[Record]) -> None:
        """Begin a new file with these records in place of all that were appended so far."""
        data = b"".join(map(_packed, records))
        self.num_bytes = 0
        self._put(data, begins_file=True)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _put(self, data: bytes, **others: Any) -> None:
        self.num_bytes += len(data)
        self._queue.put(_Batch(data=data, **{"begins_file": False, "done": None, "loop": None, **others}))

    def _write(self) -> None:
        while (first := self._queue.get()) is not None:
            batches: list[_Batch | None] = [first]
            while not self._queue.empty():
                batches.append(self._queue.get())
            waiting = [each for each in batches if each is not None]
            try:
                self._write_all(waiting)
            except OSError as error:
                self.failure = error
                logger.error("%s cannot be written: %s", self.path, error)
            for each in waiting:
                if each.loop is not None and each.done is not None and not each.loop.is_closed():
                    each.loop.call_soon_threadsafe(_resolve, each.done, self.failure)
            if len(waiting) < len(batches):
                return

    def _write_all(self, batches: list[_Batch]) -> None:
        if self.failure is not None:  # what follows a torn record could not be read again
            raise self.failure
        for each in batches:
            if each.begins_file:
                self._begin_file(each.data)
            else:
                self._file.write(each.data)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _begin_file(self, data: bytes) -> None:
        new = self.path.with_name(f"{self.path.name}.new")
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        new.replace(self.path)
        flush(self.path.parent)
        self._file = self.path.open("ab")


def _resolve(done: "asyncio.Future[None]", failure: OSError | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)
