"""Start processes in milliseconds, as forks of one that has imported and made what they need.

This *fork server* is a fresh interpreter with one thread: not a fork of its client, which may have an engine's threads,
and not that of multiprocessing, which imports the client's main module again (in an actor that is Ray's). As the parent
of the processes it also kills them, with all that they have started, and collects them, so that a reused process id is
never signalled.

The client sends {"start" | "kill": number}, "start" with the process's socket attached. The server sends
{"ready": true}, or {"error": cause} and ends; it ends, with all processes, when its socket is closed. What a process
and the client say to each other is theirs; if it cannot be forked, its first line is {"error": cause}. All is JSON.
"""

import asyncio
import gc
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import NoReturn, TypeVar

import psutil

from coati_rl.errors import ConfigError
from coati_rl.processes.ending import adopt_orphans, end_with_parent
from coati_rl.text import shorten

logger = logging.getLogger(__name__)
Made = TypeVar("Made")
Said = TypeVar("Said")

_MAX_STRETCH = 10  # of the time for a start, for a server that computes
_CPU_CLOCK = 2  # CPUCLOCK_SCHED of the kernel, for the clock of another process: see clock_getcpuclockid(3)
_COLLECT_S = 0.01  # between two looks at killed processes that have not ended
_ONCE, _IN_EACH = "make it once", "make it in each process"


def start(body: str, variables: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a fork server, which ends with the *thread* that calls this (PR_SET_PDEATHSIG).

    Args:
        body: Python code that calls `serve` with the same body.
        variables: of its environment. Secrets belong here: every user can read arguments.
    Returns: the process, and its socket.
    Raises: OSError if no process can be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    import_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    with theirs:
        try:
            process = subprocess.Popen(  # -P: import from the parent's paths, see PYTHONPATH
                [sys.executable, "-P", "-c", body, str(theirs.fileno()), str(os.getpid()), _ONCE],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the parent's stdout may contain results
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": import_path, **variables},
            )
        except OSError:
            ours.close()
            raise
    ours.setblocking(False)
    return process, ours


async def first_message(server_pid: int, message: Coroutine[None, None, Said], timeout_s: float) -> Said:
    """Wait for what a server, or a process of it, says when it has started.

    If the server or its processes used a core meanwhile, on a machine that is busy or loads models, they have the time
    again, ten times at most: whoever ended them for being slow would begin their imports anew.

    Raises: TimeoutError with the seconds that it was given.
    """
    task = asyncio.ensure_future(message)
    waited_s, has_run = 0.0, True
    try:
        while has_run and waited_s < _MAX_STRETCH * timeout_s:
            before = _family_cpu_time_s(server_pid)
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
            if done:
                return task.result()
            has_run = _family_cpu_time_s(server_pid) > before
            waited_s += timeout_s
        raise TimeoutError(f"{waited_s:g} s")
    finally:
        task.cancel()


def cpu_time_s(pid: int) -> float:
    """Return the CPU time of a process so far, in seconds; 0 if it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | _CPU_CLOCK)
    except OSError:
        return 0.0


def _family_cpu_time_s(pid: int) -> float:
    family = [pid]
    with suppress(psutil.NoSuchProcess):
        family += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return sum(map(cpu_time_s, family))


def wait_for_end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait for the end of a server whose socket is closed, and kill it if it takes longer."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def as_line(message: object) -> bytes:
    """Encode a message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def described(error: Exception) -> str:
    """Return the error on one line; the message of a ConfigError needs no type name."""
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {shorten(error, 300)}"


def serve(
    body: str,
    make: Callable[[], Made],
    run: Callable[[Callable[[], Made], socket.socket], None],
    *,
    keeps_orphans: bool = False,
) -> None:
    """Be the server, until the client closes its end; the socket and the client's process id are in argv.

    Args:
        body: as in `start`.
        make: what all processes share, before they are forked. If that starts threads, which a fork would lack, each
            process makes its own.
        run: what a process does with `make` and its socket, until the client closes the other end.
        keeps_orphans: processes whose own parent ends stay below the process that they come from, and end with it,
            also in a session of their own. Its zombies then stay until it ends.
    Raises: what `make` raises, but a ConfigError; the client is told of both.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, the kernel would reap the processes
    end_with_parent(int(sys.argv[2]))
    control = socket.socket(fileno=int(sys.argv[1]))
    get = make
    if sys.argv[3] == _ONCE:
        try:
            made = make()
        except Exception as error:
            control.send(as_line({"error": described(error)}))
            if isinstance(error, ConfigError):
                return
            raise
        if len(os.listdir("/proc/self/task")) > 1:
            logger.warning("threads were started by what is imported: each process imports it by itself")
            sys.stderr.flush()
            os.execv(sys.executable, [sys.executable, "-P", "-c", body, *sys.argv[1:3], _IN_EACH])

        def get() -> Made:
            return made

    gc.collect()
    gc.freeze()  # objects that exist now are never collected, so that the processes' pages stay shared
    if keeps_orphans:
        adopt_orphans()
    control.send(as_line({"ready": True}))
    _Processes(control, lambda sock: run(get, sock), keeps_orphans).serve()


class _Processes:
    """Fork, kill and collect the processes, in the server."""

    def __init__(self, control: socket.socket, run: Callable[[socket.socket], None], keeps_orphans: bool) -> None:
        self._control = control
        self._run = run
        self._keeps_orphans = keeps_orphans
        self._pids: dict[int, int] = {}  # by number
        self._killed: set[int] = set()  # process ids that have not been collected yet

    def serve(self) -> None:
        """Execute requests until the client closes its end, then end all processes."""
        while True:
            has_message, _, _ = select.select([self._control], [], [], _COLLECT_S if self._killed else None)
            self._collect()
            if not has_message:
                continue
            message, descriptors, _, _ = socket.recv_fds(self._control, 1024, 1)
            if not message:
                break
            ((command, number),) = json.loads(message).items()
            if command == "start":
                self._start(number, socket.socket(fileno=descriptors[0]))
            elif number in self._pids:
                self._kill(self._pids[number])
        while children := psutil.Process().children():
            for child in children:
                self._kill(child.pid)
            self._collect()

    def _collect(self) -> None:
        """Collect the processes that have ended, after killing what they have left."""
        num_collected = 0
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = ended.si_pid  # of a zombie, so that no other process can have it
                if pid in self._pids.values():
                    _kill(pid)
                    self._pids = {number: each for number, each in self._pids.items() if each != pid}
                os.waitpid(pid, 0)
                self._killed.discard(pid)
                num_collected += 1
        if num_collected and self._keeps_orphans:  # what they have left is a child of this process now
            for child in psutil.Process().children():
                if child.pid not in self._pids.values():
                    self._kill(child.pid)

    def _kill(self, pid: int) -> None:
        _kill(pid)
        self._killed.add(pid)

    def _start(self, number: int, sock: socket.socket) -> None:
        sock.set_inheritable(False)  # what a process starts must not get it
        with sock:
            parent_pid = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                with suppress(OSError):
                    sock.send(as_line({"error": f"no process can be forked: {error}"}))
                return
            if pid == 0:
                self._become_process(parent_pid, sock)
            with suppress(OSError):
                os.setpgid(pid, pid)  # also called in the process, since either may be first
            self._pids[number] = pid

    def _become_process(self, parent_pid: int, sock: socket.socket) -> NoReturn:
        exit_code = 1
        try:
            self._control.close()
            os.setpgid(0, 0)
            end_with_parent(parent_pid)
            if self._keeps_orphans:
                adopt_orphans()
            self._run(sock)
            exit_code = 0
        except BaseException:  # noqa: BLE001 - a fork must not return into the loop of `serve`
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(exit_code)


def _kill(pid: int) -> None:
    """Kill a process that is not collected yet, its process group and its descendants."""
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(pid).children(recursive=True)
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.kill()
