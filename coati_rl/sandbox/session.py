"""Run pieces of code one after another in one sandboxed process, which keeps its variables between them.

Limits hold for each call. The process is stopped between calls, so that nothing it has left running takes time.
"""

import os
from types import TracebackType

from coati_rl.sandbox.box import Sandbox, SandboxError, make_descriptors, read, start_request, write
from coati_rl.sandbox.limits import Limits, Outcome

_CALL, _CLOSE = b"call", b"close"
_SOURCE, _OUTPUT, _ERROR_OUTPUT = 0, 2, 3  # of the descriptors


class PythonSession:
    """Keep an interpreter in a sandbox, which it has for itself until it is closed.

    Args:
        sandbox: that nothing else runs in.
        limits: of each call; those of memory, files and processes are of the whole session.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._descriptors: list[int] = []
        self._directory = ""

    @property
    def is_open(self) -> bool:
        """Return True if the variables of earlier calls are there; else the next call begins anew."""
        return bool(self._descriptors)

    def open(self) -> None:
        """Start the interpreter, unless it runs. Raises: as `call`."""
        if self._descriptors:
            return
        try:
            self._open()
        except BaseException:
            self._release()
            self._sandbox.close()
            raise

    def call(self, code: str) -> Outcome:
        """Run a piece of code; the value of an expression at its end is printed.

        Returns: "exit" with code 0, or 1 after an exception; any other end is that of the session, too.
        Raises: SandboxError, ConfigError as `Sandbox.run`; the sandbox is closed then.
        """
        self.open()
        try:
            for number in (_SOURCE, _OUTPUT, _ERROR_OUTPUT):
                os.ftruncate(self._descriptors[number], 0)
            os.lseek(self._descriptors[_SOURCE], 0, os.SEEK_SET)
            write(self._descriptors[_SOURCE], code.encode(errors="replace"))
            reply = self._sandbox.exchange(_CALL, limits=self._limits)
            is_alive = reply.pop("is_alive")
            outputs = [read(self._descriptors[number]) for number in (_OUTPUT, _ERROR_OUTPUT)]
        except BaseException:  # else the next call would receive this one's reply
            self._release()
            self._sandbox.close()
            raise
        if not is_alive:
            self._release()
        return Outcome(**reply, output=outputs[0], error_output=outputs[1], returned=b"")

    def close(self) -> None:
        """End the process and all that it has started; the sandbox can be used again."""
        if not self._descriptors:
            return
        try:
            self._sandbox.exchange(_CLOSE, limits=self._limits)
        except BaseException:
            self._sandbox.close()
            raise
        finally:
            self._release()

    def __enter__(self) -> "PythonSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        self._sandbox.start()
        self._descriptors = make_descriptors()
        self._directory = self._sandbox.make_directory()
        request = start_request(self._limits, self._directory, is_session=True)
        reply = self._sandbox.exchange(request, self._descriptors, limits=self._limits)
        if reply["end"] != "open":
            raise SandboxError(f"the interpreter was not started: {reply['end']}")

    def _release(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        self._sandbox.remove_directory(self._directory)
