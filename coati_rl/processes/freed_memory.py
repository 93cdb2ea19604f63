"""Return freed memory to the operating system."""

import ctypes


def return_freed_memory() -> None:
    """Return the heap's free pages; glibc keeps those of smaller blocks, with another C library nothing happens."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
