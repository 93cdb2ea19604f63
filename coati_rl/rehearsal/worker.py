"""Keep one object in a child process, whose methods are called with a deadline; its libraries are loaded once.

A user's code, which the object may import, can hang or end that process without harm to the rehearsal.
"""

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from coati_rl.errors import CoatiError, RunError
from coati_rl.processes.ending import end_with_parent

SLOW = " (--limit-s gives a slow machine more time)"  # after a deadline that has passed


class Worker:
    """Call an object's methods in a forked process."""

    def __init__(self, make: Callable[[], Any], log: Path) -> None:
        """Fork, before this process has threads.

        Args:
            make: creates the object, in the child.
            log: file that the child's output goes to.
        """
        self._connection, other = Pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _serve(make, other, log, parent)
        other.close()

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
                raise RunError(f"{what}: did not end within {timeout_s:.0f} s{SLOW}")
            has_returned, result = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RunError(f"{what}: its process has ended, possibly for lack of memory") from error
        if not has_returned:
            raise result
        return result

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _serve(make: Callable[[], Any], connection: Connection, log: Path, parent: int) -> None:
    """Answer calls until the other end is closed, and end this process."""
    try:
        end_with_parent(parent)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(output, stream)
        subject = make()
        with suppress(EOFError, OSError):
            while True:
                method, arguments = connection.recv()
                connection.send_bytes(_answer(getattr(subject, method), arguments))
    finally:
        os._exit(0)


def _answer(method: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        answer: bytes = cloudpickle.dumps((True, method(*arguments)))
    except CoatiError as error:
        return bytes(cloudpickle.dumps((False, error)))
    except BaseException as error:  # noqa: BLE001, a user's code may raise anything; the parent reports it
        os.write(1, "".join(traceback.format_exception(error)).encode(errors="replace"))  # to the log
        return bytes(cloudpickle.dumps((False, RunError(f"{type(error).__name__}: {error}"))))
    return answer
