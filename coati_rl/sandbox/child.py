"""Turn a forked child into a program: limits, another user, no privileges, and the filter of system calls.

Imported by the supervisor alone, which forks and calls `Child.run` in the child.
"""

import ctypes
import os
import resource
import signal
from contextlib import suppress
from typing import Any

import interactive  # type: ignore[import-not-found]  # in this file's directory, which the supervisor adds to the path
import program  # type: ignore[import-not-found]  # as above

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_PR_SET_THP_DISABLE = 41
_SECCOMP_MODE_FILTER = 2
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_COUNTS_PER_NAMESPACE = (5, 14)  # first Linux version that counts processes per user namespace
_PROCESSES_OF_OURS = 1
_MAX_SIGNALS = 64  # waiting for delivery
_SESSION_CPU_S = 24 * 3600  # of all calls of a session; the supervisor limits each

libc = ctypes.CDLL(None, use_errno=True)


class _SockFprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class Child:
    """Start programs in forked children."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._filter = bytes.fromhex(settings["seccomp"])
        self._user = settings["user"]  # of programs; None: the current one, the only one in this user namespace
        self._is_isolated = settings["is_isolated"]
        # Else the kernel counts all processes of the user who started this, and only the supervisor limits a program.
        kernel = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
        self._counts_processes = self._is_isolated and (self._user is not None or kernel >= _COUNTS_PER_NAMESPACE)
        self._names = program.function_task_names()

    def run(self, request: dict[str, Any], descriptors: list[int], failed: int, control: int | None = None) -> None:
        """Run the program, or a session, in the child and exit.

        Args:
            request: of the supervisor's other side.
            descriptors: source, input, output, error output, returned value.
            failed: a failure before the program starts is written there.
            control: the socket over which a session is told of calls; None for a program.
        """
        try:
            os.setsid()
            source = os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0).decode()
            # Received descriptors are above 4, as those of the supervisor and the sockets are.
            for number in range(4):
                os.dup2(descriptors[number + 1], number)
            if control is not None:
                os.dup2(descriptors[0], interactive.CODE_DESCRIPTOR)
                os.dup2(control, interactive.CONTROL_DESCRIPTOR)
            os.chdir(request["directory"])
            self._set_limits(request["limits"], is_session=control is not None)
            self._drop_privileges()
            if control is None:
                _write_source(source)
        except BaseException as error:  # noqa: BLE001 - all of it is for the other side to know
            os.write(failed, repr(error).encode())
            os._exit(1)
        try:
            if control is not None:
                os.closerange(interactive.CONTROL_DESCRIPTOR + 1, 1 << 20)
                os._exit(interactive.run_session())
            os.closerange(4, 1 << 20)
            function = request["function"]
            os._exit(program.run_program(source, function, self._names if function else {}))
        finally:
            os._exit(1)

    def _set_limits(self, limits: dict[str, Any], *, is_session: bool) -> None:
        # Whole seconds; the supervisor's own check is finer.
        cpu_s = _SESSION_CPU_S if is_session else int(limits["cpu_s"]) + 1
        for limit, value in (
            (resource.RLIMIT_CORE, 1),  # 0 does not hold for a machine that hands core files to a program; 1 does
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_SIGPENDING, _MAX_SIGNALS),
            (resource.RLIMIT_CPU, cpu_s),
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_FSIZE, limits["output_bytes"]),
            (resource.RLIMIT_NOFILE, limits["num_open_files"]),
        ):
            resource.setrlimit(limit, (value, value))
        if self._counts_processes:
            num_processes = limits["num_processes"] + (_PROCESSES_OF_OURS if self._user is None else 0)
            resource.setrlimit(resource.RLIMIT_NPROC, (num_processes, num_processes))

    def _drop_privileges(self) -> None:
        if self._user is not None:
            os.setgroups([])
            os.setresgid(self._user, self._user, self._user)
            os.setresuid(self._user, self._user, self._user)
        elif self._is_isolated:
            header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
            check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
        check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl PDEATHSIG")
        check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")
        # The rest of a partly unmapped huge page occupies a huge page, but counts as little.
        check(libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0), "prctl THP_DISABLE")
        if self._filter:
            fprog = _SockFprog(len(self._filter) // 8, self._filter)
            check(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(fprog), 0, 0), "seccomp")


def _write_source(source: str) -> None:
    """Write solution.py, which __file__ names; ignore a full disk."""
    with suppress(OSError):
        with open("solution.py", "w", encoding="utf-8") as file:
            file.write(source)
        # An old time: else Python's import cache would miss a module that the program writes within a clock tick.
        os.utime(".", (0, 0))


def check(result: int, what: str) -> None:
    """Raise OSError if a call of the C library failed."""
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
