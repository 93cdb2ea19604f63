"""Provide the functions of cupy.cuda.runtime that coati_rl.transport.ipc calls, on the emulated runtime."""

import ctypes
import sys
from types import ModuleType

import cupy
from emulation.start import LIBRARIES

RUNTIME = ctypes.CDLL(str(LIBRARIES / "libcudart.so.13"))
HANDLE_BYTES = 64


class CUDARuntimeError(RuntimeError):
    """Say that the runtime has refused a call, as cupy's error of this name."""


class _Handle(ctypes.Structure):
    _fields_ = (("text", ctypes.c_char * HANDLE_BYTES),)


RUNTIME.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]


def _call(name: str, *arguments: object) -> None:
    if error := getattr(RUNTIME, name)(*arguments):
        raise CUDARuntimeError(f"{name}: error {error}")


def malloc(size: int) -> int:
    """Allocate memory on the current device. Returns: its address."""
    pointer = ctypes.c_void_p()
    _call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
    return pointer.value or 0


def free(pointer: int) -> None:
    """Free what `malloc` has returned."""
    _call("cudaFree", ctypes.c_void_p(pointer))


def ipcGetMemHandle(pointer: int) -> bytes:
    """Return the handle of an allocation, 64 bytes."""
    handle = ctypes.create_string_buffer(HANDLE_BYTES)
    _call("cudaIpcGetMemHandle", handle, ctypes.c_void_p(pointer))
    return handle.raw


def ipcOpenMemHandle(handle: bytes, flags: int = 1) -> int:
    """Map another process's allocation. Returns: its address."""
    if len(handle) != HANDLE_BYTES:
        raise ValueError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
    pointer = ctypes.c_void_p()
    _call("cudaIpcOpenMemHandle", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), flags)
    return pointer.value or 0


def ipcCloseMemHandle(pointer: int) -> None:
    """Unmap what `ipcOpenMemHandle` has returned."""
    _call("cudaIpcCloseMemHandle", ctypes.c_void_p(pointer))


def replace_runtime() -> None:
    """Put these functions in the place of cupy's module."""
    module = ModuleType("cupy.cuda.runtime")
    for function in (CUDARuntimeError, malloc, free, ipcGetMemHandle, ipcOpenMemHandle, ipcCloseMemHandle):
        setattr(module, function.__name__, function)
    cupy.cuda.runtime = module
    sys.modules["cupy.cuda.runtime"] = module
