"""Call a function or an object's methods in a child process: its memory ends with it, and it can hang without harm."""

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from coati_rl.errors import CoatiError, RunError
from coati_rl.processes.answers import encode_answer
from coati_rl.processes.ending import end_with_parent
from coati_rl.processes.interrupts import ending_signals

Result = TypeVar("Result")

_OF_MEMORY = "possibly for lack of memory"


def call_in_child(function: Callable[[], Result], *, what: str) -> Result:
    """Return what `function` returns, or raise what it raises, in a forked child of this process.

    Args:
        function: without threads before it; what it returns or raises must be picklable by cloudpickle.
        what: it does, for the message if the child is killed.
    Raises: RunError if the child is killed.
    """
    receiving, sending = os.pipe()

    def answer() -> None:
        try:
            found = encode_answer(True, function(), dumps=cloudpickle.dumps)
        except BaseException as error:  # noqa: BLE001, raised again by the parent
            if not isinstance(error, CoatiError | KeyboardInterrupt):
                error.add_note(f"in a child process:\n{''.join(traceback.format_exception(error))}")
            found = encode_answer(False, error, dumps=cloudpickle.dumps)
        with os.fdopen(sending, "wb") as pipe:
            pipe.write(found)

    child, mask = _fork(answer)
    is_answered = False
    try:
        os.close(sending)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with os.fdopen(receiving, "rb") as pipe:
            found = pipe.read()
        is_answered = True
    finally:  # this process may have been interrupted
        if not is_answered:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    if not found:
        raise RunError(f"{what}: its process was killed (wait status {status}), {_OF_MEMORY}")
    result: Result = _result(found)
    return result


class ObjectInChild:
    """Keep an object in a forked process, whose libraries are loaded once, and call its methods with a deadline."""

    def __init__(self, make: Callable[[], Any], log: Path, *, when_late: str = "") -> None:
        """Fork, before this process has threads.

        Args:
            make: creates the object, in the child.
            log: file that the child's output goes to.
            when_late: remedy in the message of a deadline that has passed.
        """
        self._when_late = when_late
        self._connection, other = Pipe()
        self._pid, mask = _fork(lambda: _serve(make, other, log))
        other.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def call(self, method: str, *arguments: Any, timeout_s: float, what: str) -> Any:
        """Return what a method returns, or raise what it raises.

        Args:
            method: name of the method.
            arguments: of the method; picklable.
            timeout_s: past it the process is killed, seconds.
            what: the method does, for messages.
        Raises: RunError past the deadline, or if the process has ended.
        """
        try:
            self._connection.send((method, arguments))
            if not self._connection.poll(timeout_s):
                self.close()
                raise RunError(f"{what}: did not end within {timeout_s:.0f} s{self._when_late}")
            return _result(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RunError(f"{what}: its process has ended, {_OF_MEMORY}") from error

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _fork(body: Callable[[], None]) -> tuple[int, set[int | signal.Signals]]:
    """Run `body` in a child, which ends with it and with this process.

    Returns: its process id, and the signal mask to set when the child is known: until then an exception would lose it.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())
    parent, child = os.getpid(), os.fork()
    if child:
        return child, mask
    try:
        end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        body()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(0)


def _result(answer: bytes) -> Any:
    has_returned, result = pickle.loads(answer)
    if not has_returned:
        raise result
    return result


def _serve(make: Callable[[], Any], connection: Connection, log: Path) -> None:
    """Answer calls until the other end is closed."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    subject = make()
    with suppress(EOFError, OSError):
        while True:
            method, arguments = connection.recv()
            connection.send_bytes(_encoded(getattr(subject, method), arguments))


def _encoded(method: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        return bytes(cloudpickle.dumps((True, method(*arguments))))
    except CoatiError as error:
        return bytes(cloudpickle.dumps((False, error)))
    except BaseException as error:  # noqa: BLE001, a user's code may raise anything; the parent reports it
        os.write(1, "".join(traceback.format_exception(error)).encode(errors="replace"))  # to the log
        return bytes(cloudpickle.dumps((False, RunError(f"{type(error).__name__}: {error}"))))
