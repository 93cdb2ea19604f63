"""Broadcast CUDA tensors over NCCL through cupy. cupy.cuda.nccl is imported here alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from typing import Any

import torch

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline

_POLL_S = 0.0002
_cuda: Any = torch.cuda  # whose streams and events have no type annotations


def create_unique_id() -> str:
    """Return a new NCCL unique id (128 bytes) in hexadecimal, for all members of one group."""
    nccl = _import_nccl()
    with _translated("creating a group's unique id"):
        return bytes(nccl.get_unique_id()).hex()


def connect(*, unique_id: str, rank: int, world_size: int) -> Any:
    """Join a group on the calling thread's current device, and return cupy's communicator.

    cupy takes the id as bytes since version 14. Raises: TransferError, also for an id that is not one.
    """
    nccl = _import_nccl()
    with _translated(f"rank {rank} of {world_size}, connecting"):
        return nccl.NcclCommunicator(world_size, bytes.fromhex(unique_id), rank)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Convert what cupy raises to a TransferError: NcclError, and TypeError and ValueError for arguments."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        raise TransferError(f"{what}: {error}") from error


class CupyNcclCommunicator:
    """Implement `Communicator` on cupy.cuda.nccl, on a separate stream."""

    def __init__(self, *, unique_id: str, rank: int, world_size: int, device: torch.device) -> None:
        """Block until all ranks are connected. NCCL has no deadline of its own: run it under `Deadline.run`."""
        self._device = device
        with torch.cuda.device(device):  # NCCL takes the calling thread's current device
            self._nccl: Any = connect(unique_id=unique_id, rank=rank, world_size=world_size)
            self._uint8 = _import_nccl().NCCL_UINT8
            self._stream = _cuda.Stream(device)

    def start(self, data: torch.Tensor, *, root: int, deadline: Deadline, what: str) -> "_Operation":
        if self._nccl is None:
            raise TransferError(f"{what}: the group is closed")
        with torch.cuda.device(self._device):
            # The current stream may still write the bytes to send, or read what the memory held before.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            done = _cuda.Event()
            try:
                self._nccl.bcast(data.data_ptr(), data.numel(), self._uint8, root, self._stream.cuda_stream)
                done.record(self._stream)
            except RuntimeError as error:
                self._abort()
                raise TransferError(f"{what}: {error}") from error
        return _Operation(self, done, data)

    def wait_for(self, done: Any, *, deadline: Deadline, what: str) -> None:
        """Return when the event has been reached; abort the communicator when it cannot be."""
        try:
            while not done.query():
                if self._nccl is None:
                    raise TransferError(f"{what}: the group is closed")
                # A kernel whose peer is dead spins for ever: the error is reported on the communicator only.
                self._nccl.check_async_error()
                deadline.check(what)
                sleep(_POLL_S)
        except TransferError:
            self._abort()
            raise
        except RuntimeError as error:  # cupy's NcclError and torch's CUDA errors
            self._abort()
            raise TransferError(f"{what}: {error}") from error

    def close(self) -> None:
        """See `Communicator.close`. Between two operations nothing is in flight, so that an abort loses nothing."""
        self._abort()

    def _abort(self) -> None:
        """Abort rather than destroy: abort() does not wait for the peers, and ends a kernel that still spins."""
        communicator, self._nccl = self._nccl, None
        if communicator is not None:
            communicator.abort()


class _Operation:
    """Implement `Operation`; it keeps the memory that NCCL uses alive."""

    def __init__(self, communicator: CupyNcclCommunicator, done: Any, data: torch.Tensor) -> None:
        self._communicator, self._done, self._data = communicator, done, data

    def wait(self, *, deadline: Deadline, what: str) -> None:
        self._communicator.wait_for(self._done, deadline=deadline, what=what)


def _import_nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise TransferError(f"the nccl backend needs cupy (setup.py extra gpu-cu12 or gpu-cu13): {error}") from error
    if not getattr(nccl, "available", True):
        raise TransferError("the nccl backend needs a cupy that finds the NCCL library (pip package nvidia-nccl-cuXX)")
    return nccl
