"""Share GPU memory with other processes of the node by CUDA IPC. cupy's CUDA runtime is imported here alone.

The handle is 64 bytes of cudaIpcGetMemHandle, sent as hexadecimal. The memory comes from cudaMalloc itself, since a
handle refers to a whole allocation and torch's caching allocator returns parts of them. CUDA opens no handle in the
process that made it, which has the memory.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline


class IpcSegment:
    """Implement `Segment`. It has no name that could be left behind: CUDA frees it with the processes that map it."""

    def __init__(self, device: torch.device, name: str, num_bytes: int) -> None:
        """Take the GPU: the owner's, which holds the memory; on others, the one from which it is read."""
        self._device = device
        self._num_bytes = num_bytes
        self._memory: _Memory | None = None

    def create(self) -> str:
        runtime = _import_runtime()
        with torch.cuda.device(self._device):
            try:
                pointer = int(runtime.malloc(self._num_bytes))
                self._memory = _Memory(pointer, self._num_bytes, release=runtime.free)
                handle = bytes(runtime.ipcGetMemHandle(pointer)).hex()
            except RuntimeError as error:
                raise TransferError(f"cannot share {self._num_bytes} bytes of {self._device}: {error}") from error
        _own[handle] = self._memory
        return handle

    def open(self, text: str) -> None:
        if (own := _own.get(text)) is not None:
            self._memory = own
            return
        runtime = _import_runtime()
        try:
            handle = bytes.fromhex(text)
        except ValueError as error:
            raise TransferError(f"a CUDA IPC handle that is not hexadecimal: {text[:80]!r}") from error
        with torch.cuda.device(self._device):
            try:
                pointer = int(runtime.ipcOpenMemHandle(handle))
            except (RuntimeError, ValueError) as error:
                raise TransferError(
                    f"cannot open the trainer's GPU memory on {self._device}: {error}; the ipc transport needs one "
                    "node and GPUs that can access each other: choose --weight-transport nccl"
                ) from error
        self._memory = _Memory(pointer, self._num_bytes, release=runtime.ipcCloseMemHandle)

    def remove_name(self) -> None:
        """Do nothing: the memory has no name."""

    def map(self, *, is_owner: bool, deadline: Deadline, what: str) -> torch.Tensor:
        memory, self._memory = self._memory, None
        if memory is None:
            raise TransferError(f"{what}: neither created nor opened")
        with torch.cuda.device(self._device):  # a new thread's current device is GPU 0, where this would be a copy
            mapped: torch.Tensor = torch.as_tensor(memory, device="cuda")  # keeps `memory` until its last view is freed
        if mapped.data_ptr() != memory.pointer:
            raise TransferError(f"{what}: {self._device} does not map the trainer's GPU memory")
        if is_owner:
            mapped.zero_()  # so that padding holds no data of other programs
        return mapped

    def close(self) -> None:
        self._memory = None

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()


class _Memory:
    """Expose device memory to torch by __cuda_array_interface__, and release it when the last tensor is freed."""

    def __init__(self, pointer: int, num_bytes: int, *, release: Any) -> None:
        self.pointer, self._release = pointer, release
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }

    def __del__(self) -> None:
        self._release(self.pointer)


_own: WeakValueDictionary[str, _Memory] = WeakValueDictionary()  # made in this process, by handle


def _import_runtime() -> Any:
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise TransferError(f"the ipc backend needs cupy (setup.py extra gpu-cu12 or gpu-cu13): {error}") from error
    return runtime
