"""Run programs one after another inside the sandbox, on requests over one socket.

This is the only trusted process in the sandbox, and the only one with capabilities. bubblewrap starts it once, with the
standard library alone; it ends, with all that it started, when the other end of the socket closes. For each program it
creates a new process namespace and new file systems for /tmp and /dev/shm, and forks a child that drops all privileges
before the program starts. When the child, which is process 1 of its namespace, ends, the kernel kills all processes
that it left. Files are removed with their file systems.

A fork of this interpreter costs a fraction of starting one, which is why the supervisor stays between programs.

Request: JSON and the descriptors [source, input, output, error output, returned value]. Reply: JSON, {"end", "code",
"cpu_s", "wall_s", "waited_s"}, as `Outcome` in limits.py describes them; or {"end": "failed", "detail"} if the sandbox
itself failed.
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
from contextlib import suppress
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import program  # type: ignore[import-not-found]  # in this file's directory, which -P keeps out of the path
import usage  # type: ignore[import-not-found]  # as above

_CLONE_NEWPID = 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MNT_DETACH = 1, 2, 4, 8, 32, 4096, 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER = 1, 38, 22, 36
_PR_SET_THP_DISABLE = 41
_SECCOMP_MODE_FILTER = 2
_M_ARENA_MAX = -8
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_COUNTS_PER_NAMESPACE = (5, 14)  # first Linux version that counts processes per user namespace
_PROCESSES_OF_OURS = 1
_MAX_REQUEST = 64 * 1024
_POLL_S = 0.02  # between two samples of what a program uses; a short program ends before the first
_KILL_TIMEOUT_S = 10.0
# Of a process's first thread: 600,000 calls deep, also through C (functools.cache takes 500 bytes, __call__ 750).
_STACK = 512 * 1024 * 1024
_THREAD_STACK = (
    8 * 1024 * 1024
)  # of the other threads, the usual size: the C library would give each as much as the first
_SIZE_OF_THREAD_ATTRIBUTES = 64  # at least sizeof(pthread_attr_t)
_MAX_SIGNALS = 64  # waiting for delivery

_libc = ctypes.CDLL(None, use_errno=True)


class _SockFprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


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
    _libc.mallopt(_M_ARENA_MAX, 1)  # a thread's own arena would take 64 MiB of a program's address space
    gc.freeze()  # pages that the collector would write to in every child
    channel.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MAX_REQUEST, 5)
        if not message:
            return
        reply = supervisor.run(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            channel.send(json.dumps(reply).encode())
        except BrokenPipeError:
            return


class SandboxSupervisor:
    """Fork programs and enforce their limits."""

    def __init__(self, settings: dict[str, Any], channel: socket.socket) -> None:
        self._channel = channel.fileno()
        self._filter = bytes.fromhex(settings["seccomp"])
        self._user = settings[
            "user"
        ]  # that programs run as; None: the current one, the only one in this user namespace
        self._owner = b"" if self._user is None else f",uid={self._user},gid={self._user}".encode()
        self._is_isolated = settings["is_isolated"]
        # Else the kernel counts all processes of the user who started this, and only `_exceeded` limits a program.
        kernel = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
        self._counts_processes = self._is_isolated and (self._user is not None or kernel >= _COUNTS_PER_NAMESPACE)
        self._names = program.function_task_names()
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        if not self._is_isolated:
            _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl SUBREAPER")
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        if self._is_isolated:
            # Programs see an empty directory there, this process the one that it has opened.
            _check(_libc.mount(b"tmpfs", b"/proc", b"tmpfs", _MS_RDONLY, b"size=4k,nr_inodes=2"), "mount /proc")
            for entry in os.scandir("/dev"):
                if not entry.is_dir():
                    _remount_read_only(entry.path)

    def run(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Run one program to its end."""
        limits = request["limits"]
        if self._is_isolated:
            size = f"size={limits['disk_bytes']},nr_inodes={limits['num_files']},mode=1777".encode() + self._owner
            for place in (b"/tmp", b"/dev/shm"):
                _check(_libc.mount(b"tmpfs", place, b"tmpfs", _MS_NOSUID | _MS_NODEV, size), "mount")
            _check(_libc.unshare(_CLONE_NEWPID), "unshare")
        failures, failed = os.pipe()
        child = os.fork()
        if child == 0:
            self._run_child(request, descriptors, failed)
        os.close(failed)
        used = usage.Usage(self._proc, child, is_alone=self._is_isolated)
        try:
            if self._is_isolated:
                # Return to the original namespace: the next one can only be created from there.
                _check(_libc.setns(self._own_pids, _CLONE_NEWPID), "setns")
            with open(failures, "rb") as stream:
                failure = stream.read().decode()  # ends when the program starts, its descriptors closed
            end = self._watch(child, limits, used)
            if used.wall_s > 0:  # sampled before; its wait for a core since then is lost once it is reaped
                used.sample()
            _, status, resources = os.wait4(child, 0)
            if not self._is_isolated:
                self._kill_orphans()
        finally:
            if self._is_isolated:
                for place in (b"/tmp", b"/dev/shm"):
                    _check(_libc.umount2(place, _MNT_DETACH), "umount")
        if failure:
            return {"end": "failed", "detail": failure}
        return {
            "end": end or ("exit" if os.WIFEXITED(status) else "signal"),
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else os.WTERMSIG(status),
            "cpu_s": max(resources.ru_utime + resources.ru_stime, used.cpu_s),
            "wall_s": used.seconds(),
            "waited_s": used.waited_s,
        }

    def _watch(self, child: int, limits: dict[str, Any], used: Any) -> str | None:
        """Wait for the child's end; kill it at a limit, which is returned, or when the requester has disconnected."""
        pidfd = os.pidfd_open(child)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.register(self._channel, 0)  # the other end's closing is always reported
            while not (events := dict(poll.poll(_POLL_S * 1000))):
                used.sample()
                if (end := self._exceeded(limits, used)) is not None:
                    break
            else:
                if pidfd in events:
                    return None
                end = "abandoned"
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll.unregister(self._channel)
            poll.poll(_KILL_TIMEOUT_S * 1000)
            return end
        finally:
            os.close(pidfd)

    def _exceeded(self, limits: dict[str, Any], used: Any) -> str | None:
        if used.cpu_s > limits["cpu_s"]:
            return "cpu"
        if used.memory_bytes > limits["memory_bytes"]:
            return "memory"
        if used.num_threads > limits["num_processes"]:
            return "processes"
        if used.wall_s - used.waited_s > limits["wall_s"]:
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

    def _run_child(self, request: dict[str, Any], descriptors: list[int], failed: int) -> None:
        """Run the program in the child and exit. A failure before the program starts is written to `failed`."""
        try:
            os.setsid()
            source = os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0).decode()
            for number in range(4):  # received descriptors are above 3, as those of the supervisor and the socket are
                os.dup2(descriptors[number + 1], number)
            os.chdir(request["directory"])
            self._set_limits(request["limits"])
            self._drop_privileges()
            _write_source(source)
        except BaseException as error:  # noqa: BLE001 - all of it is for the other side to know
            os.write(failed, repr(error).encode())
            os._exit(1)
        try:
            os.closerange(4, 1 << 20)
            function = request["function"]
            os._exit(program.run_program(source, function, self._names if function else {}))
        finally:
            os._exit(1)

    def _set_limits(self, limits: dict[str, Any]) -> None:
        cpu_s = int(limits["cpu_s"]) + 1  # whole seconds; the supervisor's own check is finer
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
            _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
        _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl PDEATHSIG")
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")
        # The rest of a partly unmapped huge page occupies a huge page, but counts as little.
        _check(_libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0), "prctl THP_DISABLE")
        if self._filter:
            fprog = _SockFprog(len(self._filter) // 8, self._filter)
            _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(fprog), 0, 0), "seccomp")


def _remount_read_only(path: str) -> None:
    """Remount a device, which stays writable, so that its times do not change: all sandboxes share the node."""
    kept = os.statvfs(path).f_flag & (
        _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    )  # the same numbers; the kernel refuses to clear them
    _check(_libc.mount(None, path.encode(), None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept, None), "remount")


def _write_source(source: str) -> None:
    """Write solution.py, which __file__ names; ignore a full disk."""
    with suppress(OSError):
        with open("solution.py", "w", encoding="utf-8") as file:
            file.write(source)
        # An old time: else Python's import cache would miss a module that the program writes within a clock tick.
        os.utime(".", (0, 0))


def _raise_stack_limit() -> None:
    """Restart this process with a larger stack limit: the kernel reserves the stack's size only at exec."""
    soft, most = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK if most < 0 else min(_STACK, most)
    if soft != wanted:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, most))  # programs may raise it; memory is limited anyway
        os.execv(sys.executable, sys.orig_argv)
    attributes = ctypes.create_string_buffer(_SIZE_OF_THREAD_ATTRIBUTES)
    _libc.pthread_attr_init(attributes)
    _libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_THREAD_STACK))
    _libc.pthread_setattr_default_np(attributes)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


if __name__ == "__main__":
    main()
