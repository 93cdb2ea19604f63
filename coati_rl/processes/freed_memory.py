"""Return freed memory to the operating system, or to the GPU."""

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def return_freed_memory(device: "torch.device | None" = None) -> None:
    """Return what PyTorch's cache holds of a GPU, or of the host the heap's free pages.

    glibc keeps those of smaller blocks; with another C library nothing happens.
    """
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
