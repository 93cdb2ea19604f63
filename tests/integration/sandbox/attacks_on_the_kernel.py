"""List programs that try to gain rights: namespaces, mounts, identities, devices, other system call conventions."""

import platform

from tests.integration.sandbox.attack import CALLS, Attack

_PORTABLE = (
    Attack(
        name="new namespaces by unshare",
        source=CALLS
        + """
flags = {"time": 0x80, "mnt": 0x20000, "cgroup": 0x02000000, "uts": 0x04000000, "ipc": 0x08000000, "user": 0x10000000,
         "pid": 0x20000000, "net": 0x40000000}
print([name for name, flag in flags.items() if not refused("unshare", flag)])
""",
        prints="[]\n",
    ),
    Attack(
        name="new namespaces by clone",
        source=CALLS
        + """
flags = [0x80, 0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x7E020000]
print([hex(flag) for flag in flags if not refused("clone", flag | signal.SIGCHLD, 0, 0, 0, 0)])
""",
        prints="[]\n",
    ),
    Attack(
        name="new namespaces by clone3",
        source=CALLS + "print(call('clone3', struct.pack('11Q', 0x10000000, *[0] * 10), 88) == -errno.ENOSYS)",
        prints="True\n",
    ),
    Attack(
        name="somebody else's namespaces",
        source=CALLS
        + """
print(refused("setns", os.pidfd_open(1), 0x20000), refused("setns", os.pidfd_open(1), 0x7E020000),
    refused("setns", os.open("/", os.O_RDONLY), 0))
""",
        prints="True True True\n",
    ),
    Attack(
        name="mounts",
        source=CALLS
        + """
print(libc.mount(b"tmpfs", b"/sandbox", b"tmpfs", 0, None), ctypes.get_errno(),
    libc.mount(b"proc", b"/proc", b"proc", 0, None), ctypes.get_errno(),
    libc.mount(None, b"/usr", None, 0x20 | 0x1000, None), ctypes.get_errno(),
    libc.mount(b"/usr", b"/tmp", None, 0x1000, None), ctypes.get_errno(),
    libc.umount2(b"/tmp", 2), ctypes.get_errno(), libc.umount2(b"/proc", 2), ctypes.get_errno())
""",
        prints="-1 1 -1 1 -1 1 -1 1 -1 1 -1 1\n",
    ),
    Attack(
        name="another root",
        source=CALLS + "print(attempt(os.chroot, '/tmp'), refused('pivot_root', b'/tmp', b'/tmp'))",
        prints="EPERM True\n",
    ),
    Attack(
        name="root again, and what it could do",
        source=CALLS
        + """
for change in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgid(0), lambda: os.setgroups([0]),
               lambda: os.setfsuid(0)):
    try:
        change()
    except (OSError, AttributeError):
        pass
header, sets = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
call("capget", header, sets)
effective, permitted, inheritable = struct.unpack("6I", sets.raw)[0:3]
print(effective, permitted, attempt(os.chown, "/usr/bin/env", 1, 1), attempt(os.mknod, "/tmp/mem", 0o20666, 0x101),
    attempt(open, "/etc/shadow"))
""",
        prints="0 0 EROFS EPERM ENOENT\n",
    ),
    Attack(
        name="rights by way of exec",
        source=CALLS
        + """
import shutil, subprocess, sys
script = '''
import ctypes, struct
libc, sets = ctypes.CDLL(None), ctypes.create_string_buffer(24)
libc.capget(struct.pack("Ii", 0x20080522, 0), sets)
print(struct.unpack("6I", sets.raw)[:2], libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None))
'''
print(call("prctl", 39, 0, 0, 0, 0), flush=True)  # PR_GET_NO_NEW_PRIVS
ran = subprocess.run([sys.executable, "-I", "-S", "-c", script])
""",
        prints="1\n(0, 0) -1\n",
    ),
    Attack(
        name="setuid programs",
        source="""
import os, subprocess
got, known = [], ("su", "mount", "umount", "passwd", "newgrp")
for folder in ("/usr/bin", "/usr/sbin"):
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.stat(path).st_mode & 0o6000 and name in known:
            arguments = {"su": ["-c", "id"], "mount": ["-t", "tmpfs", "x", "/tmp"], "umount": ["/tmp"]}.get(name, [])
            done = subprocess.run([path, *arguments], stdin=subprocess.DEVNULL, capture_output=True)
            if done.returncode == 0:
                got.append(name)
os.chmod(os.open("/tmp/x", os.O_CREAT), 0o4755)
print(got)
""",
        prints="[]\n",
    ),
    Attack(
        name="devices",
        source=CALLS
        + """
import stat
for number in (0x101, 0x102, 0x105, 0x800, 0xFE00):  # mem, kmem, zero, the first disks
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        print(attempt(os.mknod, "/tmp/device", kind | 0o666, number), end=" ")
""",
        prints="EPERM " * 10,
    ),
    Attack(
        name="wide doors into the kernel",
        source=CALLS
        + """
print(refused("bpf", 0, 0, 0), refused("io_uring_setup", 1, 0), refused("userfaultfd", 0), refused("userfaultfd", 1),
    refused("perf_event_open", 0, 0, -1, -1, 0), refused("prctl", 22, 2, 0, 0, 0))  # PR_SET_SECCOMP
""",
        prints="True True True True True True\n",
    ),
    Attack(
        name="the machine's clock, name, kernel and power",
        source=CALLS
        + """
print(attempt(time.clock_settime, time.CLOCK_REALTIME, 0), attempt(__import__("socket").sethostname, "mine"),
    libc.reboot(0x1234567), ctypes.get_errno(), libc.klogctl(3, None, 0), ctypes.get_errno(), libc.swapoff(b"/x"),
    ctypes.get_errno())
""",
        prints="EPERM EPERM -1 1 -1 1 -1 1\n",
    ),
    Attack(
        name="limits raised",
        source=CALLS
        + """
import resource
raised = []
for name in ("AS", "CORE", "CPU", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "SIGPENDING", "RTPRIO", "NICE"):
    limit = getattr(resource, "RLIMIT_" + name, {"SIGPENDING": 11, "RTPRIO": 14, "NICE": 13}.get(name))
    most = resource.getrlimit(limit)[1]
    for change in (resource.setrlimit, lambda *arguments: resource.prlimit(1, *arguments)):
        try:
            change(limit, (most + 1, most + 1))
            raised.append(name)
        except (ValueError, PermissionError):
            pass
print(raised)
""",
        prints="[]\n",
    ),
    Attack(
        name="signals and timers that wait",
        source=CALLS
        + """
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
information = struct.pack("iiii", signal.SIGRTMIN, 0, -1, 0) + bytes(112)
signals = sum(call("rt_sigqueueinfo", os.getpid(), signal.SIGRTMIN, information) == 0 for _ in range(1000))
timer = ctypes.c_int()
timers = sum(call("timer_create", 1, 0, ctypes.byref(timer)) == 0 for _ in range(1000))
print("held" if signals + timers <= 64 else (signals, timers))
""",
    ),
    Attack(
        name="core files, which some machines hand to a program of theirs",
        source="import resource; print(resource.getrlimit(resource.RLIMIT_CORE))",
        prints="(1, 1)\n",  # 0 would not stop that, 1 does
    ),
    Attack(
        name="numbers of calls that no kernel has",
        source=CALLS + "print(libc.syscall(ctypes.c_long(5000)), ctypes.get_errno())",
        prints="-1 38\n",
    ),
)

_MACHINE_CODE = """
code = libc.mmap(None, 4096, 7, 0x22, -1, 0)
ctypes.memmove(code, {code!r}, {length})
print(ctypes.CFUNCTYPE(ctypes.c_long)(code)())
"""


def _machine_code(code: bytes) -> str:
    return CALLS + _MACHINE_CODE.format(code=code, length=len(code))


# Other conventions, in which numbers mean other calls: a filter that reads the number alone would let them pass.
_OF_X86_64 = (
    Attack(
        name="calls as a 32-bit program: int 0x80 with 26, its ptrace",
        source=_machine_code(b"\xb8\x1a\x00\x00\x00\xcd\x80\xc3"),
        prints="",
        ends=("signal 31",),
    ),
    Attack(
        name="calls by their x32 numbers: ptrace",
        source=CALLS + "libc.syscall(ctypes.c_long(0x40000000 + 521), 0, 0, 0, 0)",
        prints="",
        ends=("signal 31",),
    ),
    Attack(
        name="calls by numbers below zero",
        source=CALLS + "libc.syscall(ctypes.c_long(-1000))",
        prints="",
        ends=("signal 31",),
    ),
)

ATTACKS = _PORTABLE + (_OF_X86_64 if platform.machine() == "x86_64" else ())
