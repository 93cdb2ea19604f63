"""Describe an attack: a program, how it must end and what it must print."""

from dataclasses import dataclass

from coati_rl.sandbox import Limits

_ENDLESS = frozenset({"cpu", "wall"})

# For programs that call the kernel by number. `refused(name, ...)` is True if the call fails with EPERM.
CALLS = """
import ctypes, errno, os, platform, signal, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
NUMBERS = {
    "add_key": (248, 217), "bpf": (321, 280), "clone": (56, 220), "clone3": (435, 435), "io_uring_setup": (425, 425),
    "keyctl": (250, 219), "memfd_create": (319, 279), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41), "prctl": (157, 167), "process_vm_readv": (310, 270), "ptrace": (101, 117),
    "request_key": (249, 218), "rt_sigqueueinfo": (129, 138), "setns": (308, 268), "setpriority": (141, 140),
    "shmget": (29, 194), "splice": (275, 76), "tee": (276, 77), "timer_create": (222, 107), "unshare": (272, 97),
    "userfaultfd": (323, 282), "vmsplice": (278, 75), "capget": (125, 90), "mlockall": (151, 230),
}
def call(name, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(NUMBERS[name][platform.machine() == "aarch64"]),
        *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    return result if result >= 0 else -ctypes.get_errno()
def refused(name, *arguments):
    return call(name, *arguments) == -errno.EPERM
def attempt(function, *arguments):
    try:
        return f"got {function(*arguments)!r}"
    except OSError as error:
        return errno.errorcode[error.errno]
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """A program that wants more than it may have."""

    name: str
    source: str
    prints: str | None = "held\n"  # exactly; None: what its end leaves it time for
    ends: tuple[str, ...] = ("exit 0",)  # one of these

    @property
    def limits(self) -> Limits:
        """A short time for what never ends by itself; enough to get to another limit, or to its end, for the others."""
        return Limits(cpu_s=0.2 if set(self.ends) <= _ENDLESS else 1.0)
