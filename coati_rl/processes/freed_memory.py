"""Return freed memory to the operating system, or to the GPU."""

import ctypes

import torch


def return_freed_memory(device: torch.device) -> None:
    """Return what PyTorch's cache holds of a GPU, or the heap's free pages.

    glibc keeps those of smaller blocks; with another C library nothing happens.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
