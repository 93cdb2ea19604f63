"""Broadcast over files in a directory that all members share; no network connection is needed.

Operation n is a file that its root renames to `operation-n` when it is complete, and that the others poll for. Renaming
is atomic on network file systems too, but their clients may cache a directory's entries, also that a name did not
exist: the directory is opened anew before each poll, and never listed.

A file begins with the number of operations its root has finished, so that each root knows which of its own files all
have read: it removes these when it writes the next.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline

Content = TypeVar("Content")

_COUNT_BYTES = 8  # the number at the beginning of a file
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.001, 0.05  # between two polls; in between, a tenth of the time waited so far


class FileCommunicator:
    """Implement `Communicator` for CPU tensors of a few bytes each."""

    def __init__(self, directory: Path, *, rank: int, world_size: int) -> None:
        """Create the directory on rank 0, which removes it on `close`."""
        self._directory = directory
        self._rank = rank
        self._num_started = 0
        self._unfinished: set[int] = set()  # operations
        self._written: list[int] = []  # operations of this rank whose file still exists
        self._num_finished = {other: 0 for other in range(world_size) if other != rank}  # as known to this rank
        if rank == 0:
            try:
                directory.mkdir(mode=0o700, parents=True)
            except OSError as error:
                raise TransferError(f"cannot create the directory of --weight-transport file: {error}") from error

    def start(self, data: torch.Tensor, *, root: int, deadline: Deadline, what: str) -> "FileOperation":
        number = self._num_started
        self._num_started += 1
        if root == self._rank:
            num_finished = min(self._unfinished, default=number)
            content = num_finished.to_bytes(_COUNT_BYTES, "little") + data.numpy().tobytes()
            deadline.run(lambda: self._write(number, content, what), what=what)
        else:
            self._unfinished.add(number)
        return FileOperation(self, number, data, root=root)

    def finish(self, number: int, data: torch.Tensor, *, root: int, deadline: Deadline, what: str) -> None:
        """Fill `data` with what `root` has written."""
        if root == self._rank:
            return
        path = self._path(number)
        content = read_when_there(path, Path.read_bytes, deadline=deadline, what=what)
        if len(content) != _COUNT_BYTES + data.numel():
            raise TransferError(f"{what}: {path} has {len(content)} bytes, not {_COUNT_BYTES} and {data.numel()}")
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=_COUNT_BYTES))
        self._num_finished[root] = int.from_bytes(content[:_COUNT_BYTES], "little")
        self._unfinished.discard(number)

    def close(self) -> None:
        if self._rank == 0:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"operation-{number}"

    def _write(self, number: int, content: bytes, what: str) -> None:
        path, num_finished_by_all = self._path(number), min(self._num_finished.values())
        try:
            path.with_suffix(".unfinished").write_bytes(content)
            path.with_suffix(".unfinished").rename(path)
            while self._written and self._written[0] < num_finished_by_all:
                self._path(self._written.pop(0)).unlink(missing_ok=True)
        except OSError as error:
            raise TransferError(f"{what}: cannot write {path}: {error}") from error
        self._written.append(number)


class FileOperation:
    """Implement `Operation`."""

    def __init__(self, communicator: FileCommunicator, number: int, data: torch.Tensor, *, root: int) -> None:
        self._communicator, self._number, self._data, self._root = communicator, number, data, root

    def wait(self, *, deadline: Deadline, what: str) -> None:
        self._communicator.finish(self._number, self._data, root=self._root, deadline=deadline, what=what)


def read_when_there(path: Path, read: Callable[[Path], Content], *, deadline: Deadline, what: str) -> Content:
    """Return `read(path)` as soon as another member has renamed a file to this name.

    Raises: TransferError, TransferTimeoutError.
    """
    is_given_up = threading.Event()

    def poll() -> Content:
        begin = time.monotonic()
        while not _is_there(path, what):
            pause_s = min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, (time.monotonic() - begin) / 10))
            if is_given_up.wait(pause_s):
                raise TransferError(f"{what}: given up")  # the caller has stopped waiting
        try:
            return read(path)
        except OSError as error:
            raise TransferError(f"{what}: cannot read {path}: {error}") from error

    try:
        return deadline.run(poll, what=what)  # the disk may hang
    finally:
        is_given_up.set()


def _is_there(path: Path, what: str) -> bool:
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        remedy = "--weight-transport file needs a disk that all members share"
        raise TransferError(f"{what}: cannot open {path.parent}: {error.strerror}; {remedy}") from error
    try:
        os.close(os.open(path.name, os.O_RDONLY, dir_fd=directory))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise TransferError(f"{what}: cannot open {path}: {error}") from error
    finally:
        os.close(directory)
    return True
