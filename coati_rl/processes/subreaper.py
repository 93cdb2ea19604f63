"""Run the driver in a child process and end every process of the run, whatever ends the driver.

This parent is a subreaper (prctl(2)): what the driver starts (Ray's daemons, actors, their workers) stays its
descendant even when its own parent dies. Ray's agents outlive a killed driver by a minute without it. If the subreaper
itself is killed, the kernel signals the driver, which then ends the run as after Ctrl-C.

A run always ends: its remaining processes are killed some seconds after the first signal (15, or --interrupt-grace-s),
and at once on the second. If the driver was killed, the subreaper prints how to resume the run and exits with one of
the documented codes.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from coati_rl.processes.ending import adopt_orphans, end_with_parent
from coati_rl.processes.exit_messages import (
    PROG,
    discard_output,
    no_temporary_directory,
    print_lines,
    read_note,
)
from coati_rl.processes.interrupts import ending_signals, handle_first, interrupt
from coati_rl.processes.shared_memory import family, unlink_mapped
from coati_rl.standard_streams import open_closed_streams

_REAP_S = 10.0  # for killed processes to be reaped
_REPEATED_S = 0.5  # a second signal within this is a duplicate: `timeout` and a closing terminal send it twice
_FAILED, _REFUSED, _INTERRUPTED = 1, 2, 130  # exit codes


def run_under_subreaper(main: Callable[[Path], int], *, prog: str = PROG) -> int:
    """Run `main` in a child process; must be called before any thread exists.

    Args:
        main: takes a scratch directory, short enough for socket paths; it is removed afterwards.
        prog: the program's name in messages.
    Returns: in the child, what `main` returns; in the parent, the same number, 130 if the driver had to be killed
        after a signal, 1 if something else killed it; 2 if there is no directory for temporary files.
    """
    open_closed_streams()
    try:
        scratch = Path(tempfile.mkdtemp(prefix="coati-"))
    except OSError as error:
        print_lines(no_temporary_directory(error), prog=prog)
        return _REFUSED
    adopt_orphans()
    ending = ending_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*ending, signal.SIGCHLD})
    parent, driver = os.getpid(), os.fork()
    if driver == 0:
        end_with_parent(parent, signal.SIGTERM)
        os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)  # removed with the run
        handle_first(ending, interrupt)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return main(scratch)
        finally:
            discard_output()
            shutil.rmtree(scratch, ignore_errors=True)
    code, problem = _watch(driver, ending, scratch)
    if problem:
        print_lines(f"{problem}{read_note(scratch).how_to_resume()}", prog=prog)
    shutil.rmtree(scratch, ignore_errors=True)
    return code


def _watch(driver: int, ending: set[signal.Signals], scratch: Path) -> tuple[int, str]:
    """Forward the first signal, until the driver has ended or has to be killed; then end the remaining processes.

    Returns: the exit code, and the message that the driver could not print itself.
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
            verdict = f"interrupted; processes that had not ended after {grace_s:g} s were killed"
            os.kill(driver, received.si_signo)
            _send_to_descendants(signal.SIGCONT)  # stopped processes may then end by themselves
        elif now - first_at > _REPEATED_S:
            verdict, deadline = "interrupted twice; the remaining processes were killed", now
    _end_descendants()
    if status is None:
        return _INTERRUPTED, verdict
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code, ""
    if first_at is not None:
        return _INTERRUPTED, "interrupted; everything was stopped"
    name = signal.Signals(-code).name
    hint = " (possibly out of memory: see the kernel's log)" if name == "SIGKILL" else ""
    return _FAILED, f"the run failed: its driver was killed by {name}{hint}; everything was stopped"


def _reap(driver: int) -> int | None:
    """Reap adopted processes that have ended. Returns: the driver's wait status, once it is one of them."""
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
    """Signal all descendants. Returns: those that existed."""
    descendants: list[psutil.Process] = psutil.Process().children(recursive=True)
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return descendants
