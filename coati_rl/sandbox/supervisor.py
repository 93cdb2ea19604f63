"""Run programs one after another inside the sandbox, as requests over one socket ask.

The only process of ours in there, and the only one with capabilities. Started once by bubblewrap, with nothing but the
standard library in reach; it ends, with all that it started, when the other end of the socket closes. For each program
it makes a fresh process namespace and fresh file systems for /tmp and /dev/shm, and forks a child that gives up every
right before the first line of the program. When the child, which is process 1 of its namespace, ends, the kernel ends
all that it left behind. Files go with their file systems.

A fork of this warm interpreter costs a fraction of starting one, which is why the supervisor stays between programs.

Request: JSON and the descriptors [source, input, output, error output, returned value]. Reply: JSON, {"end", "code",
"cpu_s", "wall_s", "waited_s"}, as `Outcome` in limits.py describes them; or {"end": "failed", "detail"}: the sandbox
itself.
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
import program  # type: ignore[import-not-found]  # beside this file: -P keeps its folder out of the path
import usage  # type: ignore[import-not-found]  # as above

_CLONE_NEWPID = 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MNT_DETACH = 1, 2, 4, 8, 32, 4096, 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER = 1, 38, 22, 36
_PR_SET_THP_DISABLE = 41
_SECCOMP_MODE_FILTER = 2
_M_ARENA_MAX = -8
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_COUNTS_PER_NAMESPACE = (5, 14)  # the Linux since which processes are counted for each user namespace
_PROCESSES_OF_OURS = 1
_MAX_REQUEST = 64 * 1024
_POLL_S = 0.02  # between two looks at what a program uses; a short one ends before the first
_KILL_TIMEOUT_S = 10.0
# Of a process's first thread: 600,000 calls deep, also through C (functools.cache takes 500 bytes, __call__ 750).
_STACK = 512 * 1024 * 1024
_THREAD_STACK = 8 * 1024 * 1024  # of the others, as usual: the C library would give each as much as the first
_SIZE_OF_THREAD_ATTRIBUTES = 64  # at least sizeof(pthread_attr_t)
_MAX_SIGNALS = 64  # waiting for delivery

_libc = ctypes.CDLL(None, use_errno=True)


class _SockFprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def main() -> None:
    """Serve until the other end of the socket closes. The settings are in argv as JSON."""
    _make_room_for_the_stack()
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
    """Forks programs and watches them."""

    def __init__(self, settings: dict[str, Any], channel: socket.socket) -> None:
        self._channel = channel.fileno()
        self._filter = bytes.fromhex(settings["seccomp"])
        self._user = settings["user"]  # to become; None: stay, there is but one in this user namespace
        self._owner = b"" if self._user is None else f",uid={self._user},gid={self._user}".encode()
        self._is_isolated = settings["is_isolated"]
        # Else the kernel counts all processes of the person who started this, and only `_exceeded` holds a program.
        kernel = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
        self._counts_processes = self._is_isolated and (self._user is not None or kernel >= _COUNTS_PER_NAMESPACE)
        self._names = program.function_task_names()
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        if not self._is_isolated:
            _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl SUBREAPER")
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        if self._is_isolated:
            # Programs see an empty folder there, this process what it has opened.
            _check(_libc.mount(b"tmpfs", b"/proc", b"tmpfs", _MS_RDONLY, b"size=4k,nr_inodes=2"), "mount /proc")
            for entry in os.scandir("/dev"):
                if not entry.is_dir():
                    _remount_read_only(entry.path)

    def run(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """One program to its end."""
        limits = request["limits"]
        if self._is_isolated:
            size = f"size={limits['disk_bytes']},nr_inodes={limits['num_files']},mode=1777".encode() + self._owner
            for place in (b"/tmp", b"/dev/shm"):
                _check(_libc.mount(b"tmpfs", place, b"tmpfs", _MS_NOSUID | _MS_NODEV, size), "mount")
            _check(_libc.unshare(_CLONE_NEWPID), "unshare")
        failures, failed = os.pipe()
        child = os.fork()
        if child == 0:
            self._be_the_program(request, descriptors, failed)
        os.close(failed)
        used = usage.Usage(self._proc, child, is_alone=self._is_isolated)
        try:
            if self._is_isolated:
                # Back to our own, or there could be no next one: a namespace is made from one's own only.
                _check(_libc.setns(self._own_pids, _CLONE_NEWPID), "setns")
            with open(failures, "rb") as stream:
                failure = stream.read().decode()  # ends when the program starts, its descriptors closed
            end = self._watch(child, limits, used)
            if used.wall_s > 0:  # it was looked at; what it waited for a core since then is gone with the process
                used.look()
            _, status, resources = os.wait4(child, 0)
            if not self._is_isolated:
                self._end_strays()
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
        """Wait for the child's end; past a limit kill it and say which. As well when nobody waits for the outcome."""
        pidfd = os.pidfd_open(child)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.register(self._channel, 0)  # the other end's closing is always reported
            while not (events := dict(poll.poll(_POLL_S * 1000))):
                used.look()
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

    def _end_strays(self) -> None:
        """Without a namespace: kill what the program left behind, children of this process by now."""
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

    def _be_the_program(self, request: dict[str, Any], descriptors: list[int], failed: int) -> None:
        """The child's whole life. A failure before the program starts goes to `failed`: it is none of the program's."""
        try:
            os.setsid()
            source = os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0).decode()
            for number in range(4):  # what was received is above 3, as supervisor and socket are
                os.dup2(descriptors[number + 1], number)
            os.chdir(request["directory"])
            self._set_limits(request["limits"])
            self._give_up_rights()
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
        cpu_s = int(limits["cpu_s"]) + 1  # whole seconds; the supervisor's own look is finer
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

    def _give_up_rights(self) -> None:
        if self._user is not None:
            os.setgroups([])
            os.setresgid(self._user, self._user, self._user)
            os.setresuid(self._user, self._user, self._user)
        elif self._is_isolated:
            header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
            _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
        _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl PDEATHSIG")
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")
        # What is left of a huge page when the rest of it was unmapped takes a huge page, and counts as little.
        _check(_libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0), "prctl THP_DISABLE")
        if self._filter:
            fprog = _SockFprog(len(self._filter) // 8, self._filter)
            _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(fprog), 0, 0), "seccomp")


def _remount_read_only(path: str) -> None:
    """A device can be written to as before, but its times stay: the machine and all sandboxes share the node."""
    kept = os.statvfs(path).f_flag & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)  # the same numbers; may not be taken away
    _check(_libc.mount(None, path.encode(), None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept, None), "remount")


def _write_source(source: str) -> None:
    """Write what __file__ names. Where there is no place for it the program runs without."""
    with suppress(OSError):
        with open("solution.py", "w", encoding="utf-8") as file:
            file.write(source)
        # Long ago: a module that the program writes and imports within a tick of the clock would not be looked for.
        os.utime(".", (0, 0))


def _make_room_for_the_stack() -> None:
    """Start once more under the larger limit: at exec the kernel leaves room for a stack of that size, not later."""
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
