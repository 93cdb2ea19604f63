"""The system call filter, run by an interpreter of its language: which call with which arguments ends how."""

import errno
import struct

import pytest

from coati_rl.errors import ConfigError
from coati_rl.sandbox.seccomp import seccomp_filter

ALLOWED, KILLED = "allowed", "killed"
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, ARM = 0x40000003, 0x40000028

# name: (x86_64, aarch64); from the kernel's tables, not from the filter's.
REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "fsetxattr": (190, 7),
    "vmsplice": (278, 75),
    "splice": (275, 76),
    "tee": (276, 77),
    "sendfile": (40, 71),
    "bind": (49, 200),
    "listen": (50, 201),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "seccomp": (317, 277),
    "flock": (73, 32),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "sync": (162, 81),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "syslog": (103, 116),
}
USUAL = {
    "read": (0, 63),
    "write": (1, 64),
    "openat": (257, 56),
    "close": (3, 57),
    "brk": (12, 214),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "rt_sigaction": (13, 134),
    "pipe2": (293, 59),
    "futex": (202, 98),
    "wait4": (61, 260),
    "execve": (59, 221),
    "kill": (62, 129),
    "getrandom": (318, 278),
    "fcntl": (72, 25),
    "setrlimit": (160, 164),
    "sendto": (44, 206),
    "exit_group": (231, 94),
}
CLONE, SOCKET, SOCKETPAIR = (56, 220), (41, 198), (53, 199)
MMAP, PRCTL, SETSOCKOPT, FCNTL = (9, 222), (157, 167), (54, 208), (72, 25)


def judge(program: bytes, *, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> str:
    """What the kernel would do with a call: BPF, as linux/filter.h and struct seccomp_data define it."""
    six = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<iIQ6Q", number if number < 1 << 31 else number - (1 << 32), architecture, 0, *six)
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator, position = 0, 0
    while True:
        code, if_true, if_false, value = instructions[position]
        position += 1
        if code == 0x20:  # load a word
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:  # and
            accumulator &= value
        elif code == 0x15:  # jump if equal
            position += if_true if accumulator == value else if_false
        elif code == 0x35:  # jump if greater or equal
            position += if_true if accumulator >= value else if_false
        elif code == 0x06:  # return
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(value) or errno.errorcode[value - 0x50000]
        else:
            raise AssertionError(f"unknown instruction {code:#x}")


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def call(machine: str, numbers: tuple[int, int], *arguments: int) -> str:
    column = list(ARCHITECTURES).index(machine)
    return judge(
        seccomp_filter(machine), architecture=ARCHITECTURES[machine], number=numbers[column], arguments=arguments
    )


def test_calls_that_reach_others_or_get_around_the_limits_fail_with_eperm(machine: str) -> None:
    assert {name: call(machine, numbers) for name, numbers in REFUSED.items()} == dict.fromkeys(REFUSED, "EPERM")


def test_calls_that_programs_live_by_are_allowed(machine: str) -> None:
    assert {name: call(machine, numbers) for name, numbers in USUAL.items()} == dict.fromkeys(USUAL, ALLOWED)


def test_the_number_alone_decides_about_refused_calls(machine: str) -> None:
    assert call(machine, REFUSED["ptrace"], *[2**64 - 1] * 6) == "EPERM"


@pytest.mark.parametrize("flag", [0x80, 1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30])
def test_a_clone_into_any_new_namespace_is_refused(flag: int, machine: str) -> None:
    assert call(machine, CLONE, flag) == "EPERM"
    assert call(machine, CLONE, flag | 17) == "EPERM"
    assert call(machine, CLONE, flag | 1 << 32) == "EPERM"


def test_a_fork_and_a_thread_are_allowed(machine: str) -> None:
    assert call(machine, CLONE, 0x01200011) == ALLOWED  # fork as glibc does it
    assert call(machine, CLONE, 0x003D0F00) == ALLOWED  # pthread_create
    assert call(machine, CLONE, 0x00004111) == ALLOWED  # posix_spawn: CLONE_VM, CLONE_VFORK


def test_clone3_is_said_not_to_exist_because_its_flags_are_in_memory(machine: str) -> None:
    assert call(machine, (435, 435), 0, 88) == "ENOSYS"


def test_sockets_are_of_this_machine_only(machine: str) -> None:
    for numbers in (SOCKET, SOCKETPAIR):
        families = [family for family in range(64) if call(machine, numbers, family, 1) == ALLOWED]
        assert families == [1]  # AF_UNIX
        assert call(machine, numbers, 2**32 - 1) == "EPERM"
        assert call(machine, numbers, 2**32 + 1) == ALLOWED  # the kernel takes the low word


def test_socket_buffers_keep_their_size_and_sockets_have_no_filters(machine: str) -> None:
    options = [option for option in range(100) if call(machine, SETSOCKOPT, 3, 1, option) == ALLOWED]
    assert options == [0, 1, 2, 3]  # up to SO_REUSEADDR, which multiprocessing sets, and SO_TYPE


def test_shared_mappings_need_a_file(machine: str) -> None:
    shared, private, fixed, anonymous, huge = 0x1, 0x2, 0x10, 0x20, 0x40000
    assert call(machine, MMAP, 0, 4096, 3, shared | anonymous) == "EPERM"
    assert call(machine, MMAP, 0, 4096, 3, 0x3 | anonymous | fixed) == "EPERM"  # MAP_SHARED_VALIDATE
    assert call(machine, MMAP, 0, 4096, 3, private | anonymous | huge) == "EPERM"
    assert call(machine, MMAP, 0, 4096, 3, private | anonymous) == ALLOWED
    assert call(machine, MMAP, 0, 4096, 3, shared) == ALLOWED
    assert call(machine, MMAP, 0, 4096, 5, private | fixed) == ALLOWED


def test_filters_and_huge_pages_cannot_be_switched(machine: str) -> None:
    assert [option for option in range(1, 80) if call(machine, PRCTL, option) == "EPERM"] == [22, 41, 62]


def test_another_architecture_s_calls_kill(machine: str) -> None:
    other = ARCHITECTURES["aarch64" if machine == "x86_64" else "x86_64"]
    for architecture in (I386, ARM, other, 0):
        assert judge(seccomp_filter(machine), architecture=architecture, number=0) == KILLED


def test_x32_numbers_and_negative_ones_kill(machine: str) -> None:
    for number in (0x40000000, 0x40000000 + 521, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
        assert judge(seccomp_filter(machine), architecture=ARCHITECTURES[machine], number=number) == KILLED


def test_the_filter_is_short_enough_for_the_kernel(machine: str) -> None:
    assert len(seccomp_filter(machine)) // 8 < 4096


def test_on_an_unknown_machine_there_is_no_sandbox() -> None:
    with pytest.raises(ConfigError, match="no system calls of 'riscv64'; run on x86_64 or aarch64, or have"):
        seccomp_filter("riscv64")


@pytest.mark.parametrize("command", [5, 36, 37, 38, 1024, 1026, 1036, 1038])
def test_marks_on_shared_files_fail_with_eperm(machine: str, command: int) -> None:
    assert call(machine, FCNTL, 3, command) == "EPERM"
    assert call(machine, FCNTL, 3, command | 1 << 32) == "EPERM"  # the kernel reads the low word alone


@pytest.mark.parametrize("command", [0, 1, 2, 3, 4, 6, 7, 1030, 1031, 1032])
def test_locks_for_writing_and_what_else_descriptors_need_is_allowed(machine: str, command: int) -> None:
    assert call(machine, FCNTL, 3, command) == ALLOWED
