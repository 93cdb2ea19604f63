"""Stop all processes of a session between its calls, and continue them.

Imported by the supervisor alone. What a call leaves running must take neither time from the machine while the policy
thinks, nor time of the next call.
"""

import os
import signal
import time
from contextlib import suppress

import usage  # type: ignore[import-not-found]  # in this file's directory, which the supervisor adds to the path

_TIMEOUT_S = 2.0  # a processor's turn on a busy machine
_PAUSE_S = 0.001
_NUM_QUIET = 2  # passes in which nothing ran: a process may have started during the first
_STOPPED = (b"T", b"t", b"Z", b"X")


def stop_all(proc: int, child: int, *, is_alone: bool) -> bool:
    """Stop the processes.

    Args:
        proc: descriptor of a /proc that shows them.
        child: the first of them.
        is_alone: /proc shows nothing but them and this process; else the child's process group is all that is stopped.
    Returns: False if some go on.
    """
    if not is_alone:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGSTOP)
        return True
    deadline, num_quiet = time.monotonic() + _TIMEOUT_S, 0
    while num_quiet < _NUM_QUIET:
        running = [process for process in _processes(proc) if _is_running(proc, process)]
        num_quiet = 0 if running else num_quiet + 1
        _signal(running, signal.SIGSTOP)
        if running:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
    return True


def continue_all(proc: int, child: int, *, is_alone: bool) -> None:
    """Continue what was stopped; the arguments are those of `stop_all`."""
    if is_alone:
        _signal(_processes(proc), signal.SIGCONT)
        return
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGCONT)


def _processes(proc: int) -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir(proc) if name.isdigit() and int(name) != own]


def _is_running(proc: int, process: int) -> bool:
    """Return True if a thread may run; the first one may have ended before the others."""
    try:
        folder = os.open(f"{process}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    except OSError:
        return False
    try:
        threads = os.listdir(folder)
    except OSError:
        return False
    finally:
        os.close(folder)
    states = [usage.read(proc, f"{process}/task/{thread}/stat").rsplit(b")", 1)[-1].split()[:1] for thread in threads]
    return any(state and state[0] not in _STOPPED for state in states)


def _signal(processes: list[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
