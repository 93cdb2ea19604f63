"""Run programs in one sandbox, one at a time, and report how each ended.

The supervisor is started for the first program and reused. It ends when its socket closes, or with the thread that
started it (bubblewrap's --die-with-parent), and kills all programs.
"""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.sandbox.bubblewrap import sandbox_command, supervisor_command
from coati_rl.sandbox.limits import Limits, Outcome
from coati_rl.sandbox.user_ids import claim_user_id
from coati_rl.text import shorten

_START_TIMEOUT_S = 30.0  # 0.1 s on an idle machine; this allows for one that is loading models
_END_TIMEOUT_S = 5.0
_GRACE_S = 15.0  # beyond the last limit, for the supervisor to kill and to answer
_MAX_REPLY = 64 * 1024


class SandboxError(Exception):
    """Report a failure of the sandbox itself, which says nothing about the program."""


class Sandbox:
    """Run untrusted programs.

    Args:
        is_isolated: False runs them with the user's rights, in separate processes with limits on time and memory, and
            no other isolation.
    """

    def __init__(self, *, is_isolated: bool = True) -> None:
        self._is_isolated = is_isolated
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._errors = -1
        self._user: tuple[int, socket.socket] | None = (
            None  # the programs' user id, and its claim; when this process is root's
        )

    def run(self, source: str, *, stdin: bytes = b"", function: str = "", limits: Limits) -> Outcome:
        """Run a Python program to its end, or to a limit.

        Args:
            source: the program.
            stdin: its input; with `function`: the arguments, a JSON list.
            function: called after the program, its value returned as JSON; a method if there is a class Solution.
        Raises: SandboxError; ConfigError when this machine cannot provide a sandbox.
        """
        self.start()
        descriptors = make_descriptors()
        directory = self.make_directory()
        try:
            write(descriptors[0], source.encode(errors="replace"))  # the model may write lone surrogates
            write(descriptors[1], stdin)
            os.lseek(descriptors[1], 0, os.SEEK_SET)
            reply = self.exchange(start_request(limits, directory, function=function), descriptors, limits=limits)
            output, error_output, returned = (read(descriptor) for descriptor in descriptors[2:])
            return Outcome(**reply, output=output, error_output=error_output, returned=returned)
        except BaseException:  # else the next run would receive this one's reply
            self.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            self.remove_directory(directory)

    def start(self) -> None:
        """Start the supervisor, unless it runs. Raises: ConfigError when this machine cannot provide a sandbox."""
        self._started_channel()

    def exchange(self, request: bytes, descriptors: Sequence[int] = (), *, limits: Limits) -> dict[str, Any]:
        """Send a request to the supervisor, which is started if need be. Returns: its reply.

        Raises: SandboxError, after which the sandbox has to be closed; ConfigError as `run`.
        """
        channel = self._started_channel()
        channel.settimeout(limits.starved_s + _GRACE_S)
        try:
            socket.send_fds(channel, [request], descriptors)
            reply: dict[str, Any] = json.loads(channel.recv(_MAX_REPLY))
        except (OSError, ValueError) as error:
            raise SandboxError(f"the sandbox does not answer: {shorten(error)} {self._error_output()}") from error
        if reply["end"] == "failed":
            raise SandboxError(f"the program could not be started: {reply['detail']}")
        return reply

    def make_directory(self) -> str:
        """Return a directory for a program: one of its own without isolation, else the same path in all."""
        return "/tmp" if self._directory is None else tempfile.mkdtemp(dir=self._directory.name)

    def remove_directory(self, directory: str) -> None:
        """Remove what `make_directory` has made."""
        if self._directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def interrupt(self) -> None:
        """End the supervisor from another thread, so that what waits for it raises SandboxError; `close` is left."""
        channel = self._channel
        if channel is not None:
            with suppress(OSError):  # closed by now
                channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the supervisor and with it every program; returns when they have ended."""
        if self._channel is not None:
            with suppress(OSError):  # the supervisor has ended already
                self._channel.shutdown(socket.SHUT_RDWR)
            self._channel.close()
            self._channel = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)  # the supervisor's end; a killed bubblewrap would not wait for it
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
        if self._user is not None:
            self._user[1].close()
            self._user = None
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started_channel(self) -> socket.socket:
        if self._channel is not None:
            return self._channel
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._start(theirs.fileno())
            ours.settimeout(_START_TIMEOUT_S)
            if ours.recv(_MAX_REPLY) != b"ready":
                raise OSError("the supervisor ended at its start")
        except OSError as error:
            ours.close()
            message = self._error_output()
            self.close()
            raise ConfigError(f"no sandbox for code rewards: {message or error}; {_REMEDY}") from error
        except ConfigError:
            ours.close()
            raise
        self._channel = ours
        return ours

    def _start(self, descriptor: int) -> None:
        if self._is_isolated:
            if os.geteuid() == 0 and self._user is None:
                self._user = claim_user_id()
            command = sandbox_command(descriptor, user=self._user[0] if self._user else None)
        else:
            self._directory = tempfile.TemporaryDirectory(prefix="coati-programs-", ignore_cleanup_errors=True)
            path = Path(__file__).parent / "supervisor.py"
            command = supervisor_command(str(path), descriptor, user=None, is_isolated=False)
        self._errors = os.memfd_create("errors")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=[descriptor],
            env={} if self._is_isolated else {"PYTHONHASHSEED": "0"},
        )

    def _error_output(self) -> str:
        """Return the error output of bubblewrap or the supervisor."""
        if self._process is not None:
            try:
                self._process.wait(1.0)  # it is ending
            except subprocess.TimeoutExpired:
                return ""
        return shorten(read(self._errors).decode(errors="replace"), 300) if self._errors >= 0 else ""


_REMEDY = (
    "bubblewrap needs user namespaces, or root with CAP_SYS_ADMIN; run programs elsewhere with "
    "--code-verifier-api-url, or with your own rights with --run-model-code-without-sandbox"
)


def check_sandbox() -> None:
    """Run a test program in a sandbox. Raises: ConfigError with a remedy if that fails on this machine."""
    with Sandbox() as sandbox:
        try:
            outcome = sandbox.run("print(6 * 7)", limits=Limits())
        except SandboxError as error:
            raise ConfigError(f"no sandbox for code rewards: {error}; {_REMEDY}") from error
    if outcome.output != b"42\n":
        raise ConfigError(f"no sandbox for code rewards: {outcome.explain(Limits())}; {_REMEDY}")


def make_descriptors() -> list[int]:
    """Return new files in memory: source, input, output, error output, returned value."""
    descriptors = [os.memfd_create(name) for name in ("source", "input", "output", "error output", "returned")]
    for descriptor in descriptors[2:]:  # without O_APPEND two writers would overwrite each other
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptors


def start_request(limits: Limits, directory: str, *, function: str = "", is_session: bool = False) -> bytes:
    """Return the request that starts a program, or opens a session."""
    all_limits = asdict(limits) | {"wall_s": limits.wall_s, "starved_s": limits.starved_s}
    request = {"limits": all_limits, "function": function, "directory": directory, "is_session": is_session}
    return json.dumps(request).encode()


def write(descriptor: int, content: bytes) -> None:
    """Write all of the content."""
    while content:
        content = content[os.write(descriptor, content) :]


def read(descriptor: int) -> bytes:
    """Return all that a file holds."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
