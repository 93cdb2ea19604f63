"""Send buckets as safetensors files in a directory that all members share, under the tensors' Hugging Face names.

A file is written under a temporary name and renamed when it is complete; the others poll for it. Rank 0 removes the
files of an update when all members have read them. Rank 0 removes the group's directory when it leaves, and any member
does when a transfer fails. Files left when all members are killed at once are removed by rank 0's next group.

With `sends_deltas` a bucket is what differs from the group's last update, which all its members have proved by digest.
A member that is new, or that has lost it, is in another group, whose first update is whole.
"""

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from coati_rl.errors import TransferError
from coati_rl.transport import delta
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.file_communicator import read_when_there
from coati_rl.transport.manifest import Bucket
from coati_rl.transport.staging_memory import StagingMemory

_GROUP_NAME = re.compile(r"group-[0-9a-f]{32}")
_DELTA_OF = "delta_of"  # in a file's metadata: the number of the update that it is applied to


def new_group_directory(directory: Path) -> Path:
    """Return the path of a new group's directory below the run's, after removing those of dead groups."""
    with suppress(FileNotFoundError):
        for entry in directory.iterdir():
            if _GROUP_NAME.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
    return directory.absolute() / f"group-{token_hex(16)}"


class FileTransport:
    """Implement `BucketTransport`. Memory: engines the update, senders two buckets; disk: the update.

    Of deltas senders keep the update, too.
    """

    def __init__(self, group: Path, *, rank: int, sends_deltas: bool = False) -> None:
        if _GROUP_NAME.fullmatch(group.name) is None:  # it will be removed
            raise TransferError(f"{group} is not the name of a group's directory")
        self._group = group
        self._rank = rank
        self._sends_deltas = sends_deltas
        self._num_updates = 0
        self._scratch: tuple[torch.Tensor, ...] = ()  # a sender's
        self._buckets: Sequence[Bucket] = ()
        self._begins: list[int] = []  # of buckets in the memory of the update
        self._memory: torch.Tensor | None = None  # of the update: an engine's staging memory, or what a sender keeps
        self._is_staging = False
        self._has_ended = False  # the last update, so that the memory holds it, and all members have proved it
        self._has_base = False  # the memory holds the update before this one

    def begin(self, buckets: Sequence[Bucket], *, memory: StagingMemory | None, deadline: Deadline, what: str) -> None:
        begins, before = [0, *accumulate(bucket.num_bytes for bucket in buckets)], self._memory
        largest = max(bucket.num_bytes for bucket in buckets)
        self._is_staging = memory is not None
        if memory is not None:
            self._memory = memory.reserve(begins[-1], deadline=deadline, what=what)
        else:
            if not self._scratch or self._scratch[0].numel() < largest:
                self._scratch = tuple(torch.zeros(largest, dtype=torch.uint8) for _ in range(2))
            if self._sends_deltas and begins != self._begins:
                self._memory = torch.zeros(begins[-1], dtype=torch.uint8)
        self._has_base = self._has_ended and self._memory is before and buckets == self._buckets
        self._buckets, self._begins, self._has_ended = buckets, begins, False
        self._num_updates += 1

    def buffer(self, index: int, count: int = 1) -> torch.Tensor:
        is_packed = self._buckets[index].sender == self._rank  # beside what a delta is taken of
        if self._memory is None or (is_packed and not self._is_staging):
            return self._scratch[index % 2][: self._buckets[index].num_bytes]
        return self._memory[self._begins[index] : self._begins[index + count]]

    def arrived(self, index: int) -> torch.Tensor:
        return self.buffer(index)

    def start(self, index: int, *, deadline: Deadline, what: str) -> None:
        if self._buckets[index].sender == self._rank:
            deadline.run(lambda: self._write(index, what), what=f"{what}, writing {self._path(index)}")

    def finish(self, index: int, *, deadline: Deadline, what: str) -> None:
        if self._buckets[index].sender != self._rank:
            read_when_there(self._path(index), lambda _: self._read(index, what), deadline=deadline, what=what)

    def end(self) -> None:
        self._has_ended = True
        if self._rank == 0:
            for index in range(len(self._buckets)):
                self._path(index).unlink(missing_ok=True)

    def close(self, *, has_failed: bool) -> None:
        if has_failed:  # rank 0, which would do it, may be dead
            shutil.rmtree(self._group, ignore_errors=True)

    def _path(self, index: int) -> Path:
        return self._group / f"update-{self._num_updates}-bucket-{index + 1}.safetensors"

    def _write(self, index: int, what: str) -> None:
        path = self._path(index)
        unfinished = path.with_suffix(".unfinished")
        content, metadata = self._delta(index) or (self._tensors(index), None)
        try:
            save_file(content, unfinished, metadata)
            unfinished.rename(path)
        except (OSError, SafetensorError) as error:
            raise TransferError(f"{what}: cannot write {path}: {error}") from error

    def _delta(self, index: int) -> tuple[dict[str, torch.Tensor], dict[str, str]] | None:
        """Return the content and metadata of a bucket's delta; None if there is no base, or the whole is smaller."""
        if self._memory is None:
            return None
        new = self.buffer(index)
        base = self._memory[self._begins[index] : self._begins[index + 1]]
        data = b""
        if self._has_base:
            data = delta.encode(new.numpy(), base.numpy(), itemsize=self._buckets[index].itemsize)
        base.copy_(new)
        if not 0 < len(data) < len(new):
            return None
        content = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
        return {"delta": content}, {_DELTA_OF: str(self._num_updates - 1)}

    def _read(self, index: int, what: str) -> None:
        path = self._path(index)
        try:
            with safe_open(path, framework="pt") as file:
                base = (file.metadata() or {}).get(_DELTA_OF)
                if base is None:
                    self._read_whole(index, file, f"{what}: {path}")
                    return
                if not self._has_base or base != str(self._num_updates - 1):
                    raise TransferError(f"{what}: {path} differs from update {base}, which is not what is here")
                data = file.get_tensor("delta").numpy()
        except (OSError, SafetensorError) as error:
            raise TransferError(f"{what}: cannot read {path}: {error}") from error
        delta.apply(data, self.buffer(index).numpy(), is_delta=True, itemsize=self._buckets[index].itemsize)

    def _read_whole(self, index: int, file: Any, what: str) -> None:
        tensors = self._tensors(index)
        if set(file.keys()) != tensors.keys():
            raise TransferError(f"{what} does not hold the announced tensors")
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
                raise TransferError(f"{what} holds {name!r} as {found.dtype}{list(found.shape)}")
            tensor.copy_(found)

    def _tensors(self, index: int) -> dict[str, torch.Tensor]:
        """Return views of the bucket's buffer by tensor name; a part of a large tensor has one dimension."""
        buffer = self.buffer(index)
        return {
            item.entry.name: item.flat(buffer).view(item.entry.shape if item.num_parts == 1 else -1)
            for item in self._buckets[index].items
        }
