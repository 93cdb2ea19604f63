"""Send buckets as safetensors files in a directory that all members share, under the tensors' Hugging Face names.

A file is written under a temporary name and renamed when it is complete; the others poll for it. Rank 0 removes the
files of an update when all members have read them. Rank 0 removes the group's directory when it leaves, and any member
does when a transfer fails. Files left when all members are killed at once are removed by rank 0's next group.
"""

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from secrets import token_hex

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.file_communicator import read_when_there
from coati_rl.transport.manifest import Bucket
from coati_rl.transport.staging_memory import StagingMemory

_GROUP_NAME = re.compile(r"group-[0-9a-f]{32}")


def new_group_directory(directory: Path) -> Path:
    """Return the path of a new group's directory below the run's, after removing those of dead groups."""
    with suppress(FileNotFoundError):
        for entry in directory.iterdir():
            if _GROUP_NAME.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
    return directory.absolute() / f"group-{token_hex(16)}"


class FileTransport:
    """Implement `BucketTransport`. Memory: engines the update, senders two buckets; disk: the update."""

    def __init__(self, group: Path, *, rank: int) -> None:
        if _GROUP_NAME.fullmatch(group.name) is None:  # it will be removed
            raise TransferError(f"{group} is not the name of a group's directory")
        self._group = group
        self._rank = rank
        self._num_updates = 0
        self._scratch: tuple[torch.Tensor, ...] = ()  # a sender's
        self._buckets: Sequence[Bucket] = ()
        self._begins: list[int] = []  # of buckets in the staging memory
        self._staged: torch.Tensor | None = None

    def begin(self, buckets: Sequence[Bucket], *, memory: StagingMemory | None, deadline: Deadline, what: str) -> None:
        """See `BucketTransport.begin`."""
        self._buckets = buckets
        self._num_updates += 1
        self._begins = [0, *accumulate(bucket.num_bytes for bucket in buckets)]
        self._staged = None if memory is None else memory.reserve(self._begins[-1], deadline=deadline, what=what)
        largest = max(bucket.num_bytes for bucket in buckets)
        if memory is None and (not self._scratch or self._scratch[0].numel() < largest):
            self._scratch = tuple(torch.zeros(largest, dtype=torch.uint8) for _ in range(2))

    def buffer(self, index: int, count: int = 1) -> torch.Tensor:
        """See `BucketTransport.buffer`."""
        if self._staged is None:
            return self._scratch[index % 2][: self._buckets[index].num_bytes]
        return self._staged[self._begins[index] : self._begins[index + count]]

    def arrived(self, index: int) -> torch.Tensor:
        """See `BucketTransport.arrived`."""
        return self.buffer(index)

    def start(self, index: int, *, deadline: Deadline, what: str) -> None:
        """See `BucketTransport.start`."""
        if self._buckets[index].sender == self._rank:
            deadline.run(lambda: self._write(index, what), what=f"{what}, writing {self._path(index)}")

    def finish(self, index: int, *, deadline: Deadline, what: str) -> None:
        """See `BucketTransport.finish`."""
        if self._buckets[index].sender != self._rank:
            read_when_there(self._path(index), lambda _: self._read(index, what), deadline=deadline, what=what)

    def end(self) -> None:
        """See `BucketTransport.end`."""
        if self._rank == 0:
            for index in range(len(self._buckets)):
                self._path(index).unlink(missing_ok=True)

    def close(self, *, has_failed: bool) -> None:
        """See `BucketTransport.close`."""
        if has_failed:  # rank 0, which would do it, may be dead
            shutil.rmtree(self._group, ignore_errors=True)

    def _path(self, index: int) -> Path:
        return self._group / f"update-{self._num_updates}-bucket-{index + 1}.safetensors"

    def _write(self, index: int, what: str) -> None:
        path = self._path(index)
        unfinished = path.with_suffix(".unfinished")
        try:
            save_file(self._tensors(index), unfinished)
            unfinished.rename(path)
        except (OSError, SafetensorError) as error:
            raise TransferError(f"{what}: cannot write {path}: {error}") from error

    def _read(self, index: int, what: str) -> None:
        path, tensors = self._path(index), self._tensors(index)
        try:
            with safe_open(path, framework="pt") as file:
                if set(file.keys()) != tensors.keys():
                    raise TransferError(f"{what}: {path} does not hold the announced tensors")
                for name, tensor in tensors.items():
                    found = file.get_tensor(name)
                    if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
                        raise TransferError(f"{what}: {path} holds {name!r} as {found.dtype}{list(found.shape)}")
                    tensor.copy_(found)
        except (OSError, SafetensorError) as error:
            raise TransferError(f"{what}: cannot read {path}: {error}") from error

    def _tensors(self, index: int) -> dict[str, torch.Tensor]:
        """Return views of the bucket's buffer by tensor name; a part of a large tensor has one dimension."""
        buffer = self.buffer(index)
        return {
            item.entry.name: item.flat(buffer).view(item.entry.shape if item.num_parts == 1 else -1)
            for item in self._buckets[index].items
        }
