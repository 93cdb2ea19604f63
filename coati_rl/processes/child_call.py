"""Call a function in a child process, so that the memory of what it loads ends with the call."""

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import cloudpickle  # type: ignore[import-untyped]

from coati_rl.errors import CoatiError, RunError
from coati_rl.processes.ending import end_with_parent
from coati_rl.processes.interrupts import ending_signals

Result = TypeVar("Result")


def call_in_child(function: Callable[[], Result], *, what: str) -> Result:
    """Return what `function` returns, or raise what it raises, in a forked child of this process.

    Args:
        function: without threads before it; what it returns or raises must be picklable by cloudpickle.
        what: it does, for the message if the child is killed.
    Raises: RunError if the child is killed.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    receiving, sending = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())  # an exception inside of fork() would be lost
    parent, child = os.getpid(), os.fork()
    if child == 0:
        _answer(function, sending, parent, mask)
    is_answered = False
    try:
        os.close(sending)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with os.fdopen(receiving, "rb") as pipe:
            answer = pipe.read()
        is_answered = True
    finally:  # this process may have been interrupted
        if not is_answered:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    if not answer:
        raise RunError(f"{what}: its process was killed (wait status {status}), possibly for lack of memory")
    has_returned, result = pickle.loads(answer)
    if not has_returned:
        raise result
    returned: Result = result
    return returned


def _answer(function: Callable[[], object], sending: int, parent: int, mask: set[int | signal.Signals]) -> None:
    """Send what the function returns or raises, and end this process."""
    try:
        end_with_parent(parent)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            answer = cloudpickle.dumps((True, function()))
        except BaseException as error:  # noqa: BLE001, raised again by the parent
            if not isinstance(error, CoatiError | KeyboardInterrupt):
                error.add_note(f"in a child process:\n{''.join(traceback.format_exception(error))}")
            answer = cloudpickle.dumps((False, error))
        with os.fdopen(sending, "wb") as pipe:
            pipe.write(answer)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(0)
