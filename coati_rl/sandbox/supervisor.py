"""Run programs one after another inside the sandbox, on requests over one socket.

This is the only trusted process in the sandbox, and the only one with capabilities. bubblewrap starts it once, with the
standard library alone; it ends, with all that it started, when the other end of the socket closes. For each program it
creates a new process namespace and new file systems for /tmp and /dev/shm, and forks a child that drops all privileges
before the program starts. When the child, which is process 1 of its namespace, ends, the kernel kills all processes
that it left. Files are removed with their file systems.

A fork of this interpreter costs a fraction of starting one, which is why the supervisor stays between programs.

Request: JSON and the descriptors [source, input, output, error output, returned value]. Reply: JSON, {"end", "code",
"cpu_s", "wall_s", "waited_s"}, as `Outcome` in limits.py describes them; or {"end": "failed", "detail"} if the sandbox
itself failed. A session is opened by a request, whose reply is {"end": "open"}; then each "call" runs the code that
"source" holds, and its reply says too if the session "is_alive"; anything else closes it ({"end": "closed"}).
"""

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import usage  # type: ignore[import-not-found]  # in this file's directory, which -P keeps out of the path
from child import Child, check, libc  # type: ignore[import-not-found]  # as above
from stopping import continue_all, stop_all  # type: ignore[import-not-found]

_CLONE_NEWPID = 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MNT_DETACH = 1, 2, 4, 8, 32, 4096, 2
_PR_SET_CHILD_SUBREAPER = 36
_M_ARENA_MAX = -8
_MAX_REQUEST = 64 * 1024
_POLL_S = 0.02  # between two samples of what a program uses; a short program ends before the first
_KILL_TIMEOUT_S = 10.0
_ENDING_S = 1.0  # between the end of a session's socket and that of its process; then it is killed
# Of a process's first thread: 600,000 calls deep, also through C (functools.cache takes 500 bytes, __call__ 750).
_STACK = 512 * 1024 * 1024
_THREAD_STACK = (
    8 * 1024 * 1024
)  # of the other threads, the usual size: the C library would give each as much as the first
_SIZE_OF_THREAD_ATTRIBUTES = 64  # at least sizeof(pthread_attr_t)


def main() -> None:
    """Serve requests until the other end of the socket closes. The settings are in argv as JSON."""
    _raise_stack_limit()
    settings = json.loads(sys.argv[1])
    channel = socket.socket(fileno=settings["descriptor"])
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    sys.path += settings["import_paths"]
    os.environ.clear()
    os.environ.update(
        PATH="/usr/bin:/bin",
        HOME="/tmp",
        TMPDIR="/tmp",
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
        MALLOC_ARENA_MAX="1",
    )
    supervisor = SandboxSupervisor(settings, channel)
    libc.mallopt(_M_ARENA_MAX, 1)  # a thread's own arena would take 64 MiB of a program's address space
    gc.freeze()  # pages that the collector would write to in every child
    channel.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MAX_REQUEST, 5)
        if not message:
            return
        request = json.loads(message)
        try:
            reply = (supervisor.run_session if request["is_session"] else supervisor.run)(request, descriptors)
        except NotStarted as error:
            reply = {"end": "failed", "detail": str(error)}
        except BrokenPipeError:
            return
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            channel.send(json.dumps(reply).encode())
        except BrokenPipeError:
            return


class NotStarted(Exception):
    """Report that a program could not be started."""


class SandboxSupervisor:
    """Fork programs and enforce their limits."""

    def __init__(self, settings: dict[str, Any], channel: socket.socket) -> None:
        self._channel = channel.fileno()
        self._user = settings["user"]
        self._owner = b"" if self._user is None else f",uid={self._user},gid={self._user}".encode()
        self._is_isolated = settings["is_isolated"]
        self._child = Child(settings)
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        if not self._is_isolated:
            check(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl SUBREAPER")
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        if self._is_isolated:
            # Programs see an empty directory there, this process the one that it has opened.
            check(libc.mount(b"tmpfs", b"/proc", b"tmpfs", _MS_RDONLY, b"size=4k,nr_inodes=2"), "mount /proc")
            for entry in os.scandir("/dev"):
                if not entry.is_dir():
                    _remount_read_only(entry.path)

    def run(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Run one program to its end. Raises: NotStarted."""
        with self._started(request, descriptors) as (child, pidfd, used):
            end = self._watch(pidfd, request["limits"], used)
            if used.wall_s > 0:  # sampled before; its wait for a core since then is lost once it is reaped
                used.sample()
            _, status, resources = os.wait4(child, 0)
        cpu_s = max(resources.ru_utime + resources.ru_stime, used.cpu_s)
        times = {"cpu_s": cpu_s, "wall_s": used.seconds(), "waited_s": used.waited_s}
        return _ended(status) | ({"end": end} if end else {}) | times

    def run_session(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Run a session: a process that runs a piece of code for each request, and is stopped between them.

        Returns: the reply to the request that ended it, or that it did not survive. Raises: NotStarted.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with ours, theirs, self._started(request, descriptors, theirs.fileno()) as (child, pidfd, used):
            theirs.close()
            reply: dict[str, Any] = {"end": "open"}
            while reply.get("is_alive", True):
                if not stop_all(self._proc, child, is_alone=self._is_isolated):
                    return reply | {"end": "processes", "is_alive": False}
                os.write(self._channel, json.dumps(reply).encode())
                if os.read(self._channel, _MAX_REQUEST) != b"call":
                    return {"end": "closed"}
                continue_all(self._proc, child, is_alone=self._is_isolated)
                reply = self._call(child, pidfd, ours, request["limits"], used)
        return reply

    def _call(
        self, child: int, pidfd: int, control: socket.socket, limits: dict[str, Any], used: Any
    ) -> dict[str, Any]:
        """Let a session run the code that was written for it. It ends at a limit, or with the code."""
        answer = b""
        used.restart()
        try:
            while control.recv(16):  # an answer of an earlier call's threads
                pass
        except BlockingIOError:
            with suppress(OSError):  # it is ending, or reads none
                control.send(b"call")
        end = self._watch(pidfd, limits, used, control.fileno())
        if end == "answered":
            with suppress(OSError):
                answer = control.recv(16)
            if not answer and _has_ended(pidfd, _ENDING_S):  # a process closes its socket before it has ended
                end = None
        used.sample()
        times = {"cpu_s": used.cpu_s, "wall_s": used.seconds(), "waited_s": used.waited_s, "is_alive": bool(answer)}
        if end is None:
            return _ended(os.waitpid(child, 0)[1]) | times
        return {"end": "exit" if end == "answered" else end, "code": int(answer != b"0")} | times

    @contextmanager
    def _started(
        self, request: dict[str, Any], descriptors: list[int], control: int | None = None
    ) -> Iterator[tuple[int, int, Any]]:
        """Start a program in namespaces of its own. Gives: its process id and descriptor, and its usage."""
        limits = request["limits"]
        if self._is_isolated:
            size = f"size={limits['disk_bytes']},nr_inodes={limits['num_files']},mode=1777".encode() + self._owner
            for place in (b"/tmp", b"/dev/shm"):
                check(libc.mount(b"tmpfs", place, b"tmpfs", _MS_NOSUID | _MS_NODEV, size), "mount")
            check(libc.unshare(_CLONE_NEWPID), "unshare")
        failures, failed = os.pipe()
        child = os.fork()
        if child == 0:
            self._child.run(request, descriptors, failed, control)
        os.close(failed)
        pidfd = os.pidfd_open(child)
        used = usage.Usage(self._proc, child, is_alone=self._is_isolated)
        try:
            if self._is_isolated:
                # Return to the original namespace: the next one can only be created from there.
                check(libc.setns(self._own_pids, _CLONE_NEWPID), "setns")
            with open(failures, "rb") as stream:
                failure = stream.read().decode()  # ends when the program starts, its descriptors closed
            if failure:
                raise NotStarted(failure)
            yield child, pidfd, used
        finally:
            with suppress(ProcessLookupError, ChildProcessError):  # it has ended, and was waited for
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.waitpid(child, 0)
            os.close(pidfd)
            if self._is_isolated:
                for place in (b"/tmp", b"/dev/shm"):
                    check(libc.umount2(place, _MNT_DETACH), "umount")
            else:
                self._kill_orphans()

    def _watch(self, pidfd: int, limits: dict[str, Any], used: Any, control: int | None = None) -> str | None:
        """Wait for a program's end (None), or an answer of a session.

        It is killed at a limit, which is returned, or when the requester has disconnected.
        """
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(self._channel, 0)  # the other end's closing is always reported
        if control is not None:
            poll.register(control, select.POLLIN)
        while not (events := dict(poll.poll(_POLL_S * 1000))):
            used.sample()
            if (end := self._exceeded(limits, used)) is not None:
                break
        else:
            if pidfd in events:
                return None
            if control in events:
                return "answered"
            end = "abandoned"
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _has_ended(pidfd, _KILL_TIMEOUT_S)
        return end

    def _exceeded(self, limits: dict[str, Any], used: Any) -> str | None:
        if used.cpu_s > limits["cpu_s"]:
            return "cpu"
        if used.memory_bytes > limits["memory_bytes"]:
            return "memory"
        if used.num_threads > limits["num_processes"]:
            return "processes"
        if used.is_late(limits["wall_s"]):
            return "wall"
        return "starved" if used.wall_s > limits["starved_s"] else None

    def _kill_orphans(self) -> None:
        """Kill the processes that a program without a namespace left, which are children of this process now."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid:
                continue
            for name in os.listdir(self._proc):
                stat = usage.read(self._proc, f"{name}/stat").rsplit(b")", 1)[-1].split() if name.isdigit() else []
                if len(stat) > 1 and int(stat[1]) == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
            time.sleep(_POLL_S / 10)


def _has_ended(pidfd: int, timeout_s: float) -> bool:
    """Wait for the end of a process. Returns: False if it goes on."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _ended(status: int) -> dict[str, Any]:
    """Return how a process ended, of its wait status."""
    if os.WIFEXITED(status):
        return {"end": "exit", "code": os.WEXITSTATUS(status)}
    return {"end": "signal", "code": os.WTERMSIG(status)}


def _remount_read_only(path: str) -> None:
    """Remount a device, which stays writable, so that its times do not change: all sandboxes share the node."""
    kept = os.statvfs(path).f_flag & (
        _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    )  # the same numbers; the kernel refuses to clear them
    check(libc.mount(None, path.encode(), None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept, None), "remount")


def _raise_stack_limit() -> None:
    """Restart this process with a larger stack limit: the kernel reserves the stack's size only at exec."""
    soft, most = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK if most < 0 else min(_STACK, most)
    if soft != wanted:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, most))  # programs may raise it; memory is limited anyway
        os.execv(sys.executable, sys.orig_argv)
    attributes = ctypes.create_string_buffer(_SIZE_OF_THREAD_ATTRIBUTES)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_THREAD_STACK))
    libc.pthread_setattr_default_np(attributes)


if __name__ == "__main__":
    main()
