"""Leave no process behind, whatever kills the run: the driver runs in a child, and the guardian around it ends what
the driver could not.

Everything the driver starts (Ray's daemons, actors, their workers) stays below the guardian even when its parent dies,
since the guardian adopts orphans. Ray's own agents outlive a killed driver by a minute, hence this. If the guardian
itself is killed, the kernel tells the driver, which then ends the run as after Ctrl-C.

A run always ends: what is left of it is killed some seconds after the first signal (15, or --interrupt-grace-s), and at
once on the second. The guardian has the last word when the driver could not: its exit code is one of the documented
ones, and its line says how the run is resumed.
"""

import ctypes
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from coati_rl.runtime.ending import give_up_output, read_note, say
from coati_rl.runtime.interrupts import ending_signals, handle_first, interrupt
from coati_rl.runtime.shared_memory import family, unlink_mapped

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 10.0  # for killed processes to vanish
_REPEATED_S = 0.5  # within which a signal is the first one again: `timeout` and a closing terminal send it twice
_FAILED, _INTERRUPTED = 1, 130  # exit codes


def run_guarded(main: Callable[[Path], int]) -> int:
    """Run `main` in a child process; must be called before any thread exists.

    Args:
        main: takes a scratch directory, short enough for socket paths; it is removed afterwards.
    Returns: in the child, what `main` returns; in the guardian, that same number, 130 if the driver had to be killed
        after a signal, 1 if something else killed it.
    """
    scratch = Path(tempfile.mkdtemp(prefix="coati-"))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ending = ending_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*ending, signal.SIGCHLD})
    driver = os.fork()
    if driver == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)  # whatever is written meanwhile goes with the run
        handle_first(ending, interrupt)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return main(scratch)
        finally:
            give_up_output()
            shutil.rmtree(scratch, ignore_errors=True)
    code, problem = _watch(driver, ending, scratch)
    if problem:
        say(f"{problem}{read_note(scratch).how_to_resume()}")
    shutil.rmtree(scratch, ignore_errors=True)
    return code


def _watch(driver: int, ending: set[signal.Signals], scratch: Path) -> tuple[int, str]:
    """Pass the first signal on, until the driver has ended or has to be killed; then end what is left.

    Returns: the exit code, and what the driver could not say itself.
    """
    first_at, deadline, verdict = None, float("inf"), ""
    while (status := _reap(driver)) is None and (left_s := deadline - time.monotonic()) > 0:
        received = signal.sigtimedwait({*ending, signal.SIGCHLD}, min(left_s, 3600.0))
        if received is None or received.si_signo == signal.SIGCHLD:
            continue
        now = time.monotonic()
        if first_at is None:
            grace_s = read_note(scratch).grace_s
            first_at, deadline = now, now + grace_s
            verdict = f"interrupted; what had not ended after {grace_s:g} s was killed"
            os.kill(driver, received.si_signo)
            _send_to_descendants(signal.SIGCONT)  # what was stopped may end by itself, too
        elif now - first_at > _REPEATED_S:
            verdict, deadline = "interrupted twice; what had not ended was killed", now
    _end_descendants()
    if status is None:
        return _INTERRUPTED, verdict
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code, ""
    if first_at is not None:
        return _INTERRUPTED, "interrupted; everything was stopped"
    name = signal.Signals(-code).name
    hint = " (was memory short? the kernel's log says so)" if name == "SIGKILL" else ""
    return _FAILED, f"the run failed: its driver was killed by {name}{hint}; everything was stopped"


def _reap(driver: int) -> int | None:
    """Take note of adopted processes that have ended. Returns: the driver's wait status, once it is one of them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == driver:
            return status
        if pid == 0:
            return None


def _end_descendants() -> None:
    unlink_mapped(family())  # the names of killed processes stay in shared memory
    deadline = time.monotonic() + _REAP_S
    while (descendants := _send_to_descendants(signal.SIGKILL)) and time.monotonic() < deadline:
        psutil.wait_procs(descendants, timeout=1.0)


def _send_to_descendants(number: signal.Signals) -> list[psutil.Process]:
    """Returns: the processes that there were."""
    descendants: list[psutil.Process] = psutil.Process().children(recursive=True)
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return descendants
