"""Have the kernel end processes with their parent, and give an ancestor the children of dead ones (prctl(2))."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def end_with_parent(parent: int | None = None, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends, whatever ended it.

    Args:
        parent: its process id, as the parent has told it; None: it is alive as this is called.
        number: the signal; it comes at once if the parent has ended before.
    Raises: OSError if the kernel refuses.
    """
    parent = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call, so the kernel sends nothing
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends. Raises: OSError if the kernel refuses."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
