"""No process is left behind, whatever kills the run: the driver runs in a child, and the guardian around it ends what
the driver could not.

Everything the driver starts (Ray's daemons, actors, their workers) stays below the guardian even when its parent dies,
since the guardian adopts orphans. Ray's own agents outlive a killed driver by a minute, hence this. If the guardian
itself is killed, the kernel tells the driver, which then ends the run as after Ctrl-C.
"""

import ctypes
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 10.0  # for killed processes to vanish


def run_guarded(main: Callable[[Path], int]) -> int:
    """Run `main` in a child process; must be called before any thread exists.

    Args:
        main: takes a scratch directory, short enough for socket paths; it is removed afterwards.
    Returns: in the child, what `main` returns; in the guardian, that same number, or 128 + n if signal n ended it.
    """
    scratch = Path(tempfile.mkdtemp(prefix="coati-"))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    driver = os.fork()
    if driver == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt_once)
        os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)  # whatever is written meanwhile goes with the run
        try:
            return main(scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(driver, number))
    _, status = os.waitpid(driver, 0)
    _end_descendants()
    shutil.rmtree(scratch, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def interrupt_once(_number: int, _frame: FrameType | None) -> None:
    """End the run cleanly on the first signal; further ones must not disturb that (a terminal sends it to all)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_descendants() -> None:
    deadline = time.monotonic() + _REAP_S
    while time.monotonic() < deadline:
        descendants = psutil.Process().children(recursive=True)
        if not descendants:
            return
        for process in descendants:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(descendants, timeout=1.0)
