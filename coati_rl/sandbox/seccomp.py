"""Build the seccomp filter (BPF) of a machine against system calls that a sandboxed program must not make.

Namespaces, limits and an unprivileged user already hold what a program can reach. The filter takes away what gets
around them (memory that no limit sees, new namespaces, a lower priority, with which a program could pose as one that
others keep from the cores) and the parts of the kernel that most attacks on it go through. A refused call fails with
EPERM, so that a program that tries it sees an error and goes on.
Numbers: the kernel's asm/unistd_64.h and asm-generic/unistd.h.
"""

import errno
import struct

from coati_rl.errors import ConfigError

_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_GREATER_EQUAL = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_FAIL = 0x00050000  # | errno

# Offsets in struct seccomp_data.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16

_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000  # x86_64 only: another set of numbers for the same calls
_WORD = 0xFFFFFFFF
_AF_UNIX = 1
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x1, 0x20, 0x40000
_PR_SET_SECCOMP, _PR_SET_THP_DISABLE, _PR_SCHED_CORE = 22, 41, 62
# fcntl: what would leave a trace on a file that the machine and all sandboxes share, or would show one. A lock for
# reading that nobody can ask about (F_GETLK) or collide with (the file is read-only) is none.
_F_GETLK, _F_OFD_GETLK, _F_OFD_SETLK, _F_OFD_SETLKW = 5, 36, 37, 38
_F_SETLEASE, _F_NOTIFY, _F_SET_RW_HINT, _F_SET_FILE_RW_HINT = 1024, 1026, 1036, 1038
_REFUSED_FCNTL = (
    *(_F_GETLK, _F_OFD_GETLK, _F_OFD_SETLK, _F_OFD_SETLKW, _F_SETLEASE, _F_NOTIFY, _F_SET_RW_HINT),
    _F_SET_FILE_RW_HINT,
)
_UP_TO_REUSEADDR = 0x3  # SO_DEBUG, SO_REUSEADDR, SO_TYPE; SO_SNDBUF and the filters come after
# CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}
_NEW_NAMESPACES = 0x80 | 0x20000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000

# name: (x86_64, aarch64); None where the machine has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # memory that the limits do not see
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "setxattr": (188, 5),  # attributes of a memfd count nowhere
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "vmsplice": (278, 75),  # a byte of a page in a pipe or a socket keeps the whole page
    "splice": (275, 76),
    "tee": (276, 77),
    "sendfile": (40, 71),
    "bind": (49, 200),  # what waits at a socket with a name stays when its sender is gone
    "listen": (50, 201),
    "sendmsg": (46, 211),  # descriptors in flight
    "sendmmsg": (307, 269),
    "io_setup": (206, 0),
    # marks on files that the machine and all sandboxes share
    "flock": (73, 32),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    # keys
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # its share of the cores and of the disk, and others'
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "fadvise64": (221, 223),
    # wide doors into the kernel
    "seccomp": (317, 277),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "lookup_dcookie": (212, 18),
    # the machine
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "vhangup": (153, 58),
}
# Numbers as above, then (argument, mask, value, is_refused): the call is refused when the low word of the argument,
# masked, is the value, or when it is not.
_REFUSED_IF: dict[str, tuple[tuple[int, int], tuple[tuple[int, int, int, bool], ...]]] = {
    "clone": ((56, 220), ((0, _NEW_NAMESPACES, 0, False),)),
    "socket": ((41, 198), ((0, _WORD, _AF_UNIX, False),)),
    "socketpair": ((53, 199), ((0, _WORD, _AF_UNIX, False),)),
    "setsockopt": ((54, 208), ((2, _WORD & ~_UP_TO_REUSEADDR, 0, False),)),
    # Memory that is shared without a file counts as nobody's once nobody has it in his page table.
    "mmap": (
        (9, 222),
        ((3, _MAP_SHARED | _MAP_ANONYMOUS, _MAP_SHARED | _MAP_ANONYMOUS, True), (3, _MAP_HUGETLB, 0, False)),
    ),
    "fcntl": ((72, 25), tuple((1, _WORD, command, True) for command in _REFUSED_FCNTL)),
    "prctl": (
        (157, 167),
        tuple((0, _WORD, option, True) for option in (_PR_SET_SECCOMP, _PR_SET_THP_DISABLE, _PR_SCHED_CORE)),
    ),
}
_CLONE3 = 435


def seccomp_filter(machine: str) -> bytes:
    """The filter as an array of struct sock_filter.

    Args:
        machine: as `platform.machine()` says it.
    Raises: ConfigError for a machine whose system calls are not known here.
    """
    if machine not in _AUDIT_ARCHITECTURES:
        raise ConfigError(
            f"the sandbox knows no system calls of {machine!r}; run on {' or '.join(_AUDIT_ARCHITECTURES)}, "
            "or have programs run elsewhere with --code-verifier-api-url"
        )
    column = list(_AUDIT_ARCHITECTURES).index(machine)
    program = [
        _statement(_LOAD_WORD, _ARCHITECTURE),
        _jump(_JUMP_EQUAL, _AUDIT_ARCHITECTURES[machine], if_true=1, if_false=0),
        _statement(_RETURN, _KILL_PROCESS),
        _statement(_LOAD_WORD, _NUMBER),
        _jump(_JUMP_GREATER_EQUAL, _X32_BIT, if_true=0, if_false=1),
        _statement(_RETURN, _KILL_PROCESS),
    ]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [_jump(_JUMP_EQUAL, number, if_true=0, if_false=1), _REFUSE]
    # The C library falls back to clone, whose flags a filter can read.
    program += [
        _jump(_JUMP_EQUAL, _CLONE3, if_true=0, if_false=1),
        _statement(_RETURN, _FAIL | errno.ENOSYS),
    ]
    for checked_numbers, tests in _REFUSED_IF.values():
        checks = [instruction for test in tests for instruction in _refuse_if(*test)]
        program += [_jump(_JUMP_EQUAL, checked_numbers[column], if_true=0, if_false=len(checks) + 1), *checks, _PASS]
    return b"".join([*program, _PASS])


def _refuse_if(argument: int, mask: int, value: int, is_refused: bool) -> list[bytes]:
    return [
        _statement(_LOAD_WORD, _FIRST_ARGUMENT + 8 * argument),
        _statement(_AND, mask),
        _jump(_JUMP_EQUAL, value, if_true=not is_refused, if_false=is_refused),
        _REFUSE,
    ]


def _statement(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(code: int, value: int, *, if_true: int, if_false: int) -> bytes:
    """Jumps skip so many instructions."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


_REFUSE, _PASS = _statement(_RETURN, _FAIL | errno.EPERM), _statement(_RETURN, _ALLOW)
