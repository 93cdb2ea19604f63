"""List programs that take memory, also outside of process counters: it is refused or ends them, and is released."""

from tests.integration.sandbox.attack import CALLS, Attack

_ANY_END = ("exit 1", "cpu", "memory", "signal 11", "signal 9")

ATTACKS = (
    Attack(
        name="one large piece",
        source="try:\n    bytearray(4 << 30)\nexcept MemoryError:\n    print('held')",
    ),
    Attack(
        name="ever more pieces",
        source="""
kept = []
try:
    while True: kept.append(bytearray(32 << 20))
except MemoryError:
    count = len(kept)
    del kept
    print("held" if count < 32 else count)
""",
        prints=None,
        ends=("exit 0", "cpu", "memory"),
    ),
    Attack(name="ever longer list", source="x = [0]\nwhile True: x += x", prints="", ends=("exit 1", "cpu", "memory")),
    Attack(
        name="shared among twenty children",
        source="""
import os, time
for _ in range(20):
    if os.fork() == 0:
        kept = bytearray(100 << 20)
        time.sleep(100)
time.sleep(100)
""",
        prints="",
        ends=("cpu", "memory"),
    ),
    Attack(
        name="behind a first thread that has ended",
        source=CALLS
        + """
import threading
def take():
    time.sleep(0.1)
    kept = bytearray(100 << 20)
    time.sleep(100)
for _ in range(12):
    if os.fork() == 0:
        threading.Thread(target=take).start()
        libc.syscall(ctypes.c_long(93 if platform.machine() == "aarch64" else 60), 0)
time.sleep(100)
""",
        prints="",
        ends=("cpu", "memory"),
    ),
    Attack(
        name="handed from child to child",
        source="""
import os, time
kept = []
while True:
    kept.append(os.urandom(16 << 20))
    if os.fork() > 0:
        time.sleep(100)
""",
        prints="",
        ends=("cpu", "memory", "wall", "exit 1"),
    ),
    Attack(
        name="anonymous shared mappings",
        source="""
import mmap
for flags in (mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, 3 | mmap.MAP_ANONYMOUS):
    try:
        mmap.mmap(-1, 1 << 20, flags=flags)
        print("got one")
    except PermissionError:
        print("held")
""",
        prints="held\nheld\n",
    ),
    Attack(
        name="shared mapping of /dev/zero",
        source="import os\ntry:\n    os.open('/dev/zero', os.O_RDWR)\nexcept FileNotFoundError:\n    print('held')",
    ),
    Attack(
        name="memory files, System V and POSIX shared memory",
        source=CALLS
        + """
print(attempt(os.memfd_create, "x"), refused("memfd_create", b"x", 4), refused("shmget", 0, 1 << 20, 0o1600))
""",
        prints="EPERM True True\n",
    ),
    Attack(
        name="/dev/shm",
        source="""
import errno
written = 0
try:
    for number in range(1000):
        with open(f"/dev/shm/{number}", "wb") as file:
            written += file.write(bytes(1 << 20))
except OSError as error:
    print("held" if error.errno == errno.ENOSPC and written <= 64 << 20 else (error, written))
""",
    ),
    Attack(
        name="gzip bomb",
        source="""
import zlib
packer = zlib.compressobj(1)
bomb = b"".join(packer.compress(bytes(1 << 22)) for _ in range(40)) + packer.flush()
try:
    kept = [zlib.decompress(bomb) for _ in range(40)]
except MemoryError:
    print("held")
""",
        prints=None,
        ends=("exit 0", "cpu", "memory"),
    ),
    Attack(
        name="pieces of huge pages, each of which holds a whole one",
        source=CALLS
        + """
print(call("prctl", 42, 0, 0, 0, 0), refused("prctl", 41, 0, 0, 0, 0))  # PR_GET_THP_DISABLE, PR_SET_THP_DISABLE
""",
        prints="1 True\n",
    ),
    Attack(
        name="the machine's reserve of huge pages",
        source=CALLS + "print(libc.mmap(None, 2 << 20, 3, 0x40022, -1, 0) == 2**64 - 1, ctypes.get_errno())",
        prints="True 1\n",
    ),
    Attack(
        name="pages given to pipes and sockets",
        source=CALLS
        + """
import socket
r, w = os.pipe()
a, b = socket.socketpair()
with open("/tmp/file", "wb+") as file:
    file.write(bytes(4096))
    file.flush()
    print(attempt(os.sendfile, a.fileno(), file.fileno(), 0, 1), attempt(os.splice, file.fileno(), w, 1, 0),
        refused("vmsplice", w, 0, 0, 0), refused("tee", r, w, 1, 0))
""",
        prints="EPERM EPERM True True\n",
    ),
    Attack(
        name="larger socket buffers, and filters kept in them",
        source=CALLS
        + """
import socket
a, b = socket.socketpair()
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 26, 50):  # SO_SNDBUFFORCE, SO_ATTACH_FILTER, SO_ATTACH_BPF
    print(attempt(a.setsockopt, socket.SOL_SOCKET, option, 1 << 30), end=" ")
""",
        prints="EPERM EPERM EPERM EPERM EPERM ",
    ),
    Attack(
        name="socket buffers, all that there are",
        source="""
import socket
kept, size = [], 0
try:
    while True:
        pair = socket.socketpair()
        kept += pair
        for end in pair:
            end.setblocking(False)
            try:
                while True: size += end.send(bytes(4096))
            except BlockingIOError:
                pass
except OSError:
    print("held" if len(kept) <= 64 and size < 16 << 20 else (len(kept), size))
""",
    ),
    Attack(
        name="what waits at a socket for somebody to come",
        source=CALLS
        + """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    made = socket.socket(socket.AF_UNIX, kind)
    print(attempt(made.bind, "\\0name"), attempt(made.bind, "/tmp/name"), attempt(made.listen, 4096))
""",
        prints="EPERM EPERM EPERM\n" * 2,
    ),
    Attack(
        name="pipe buffers, all that there are",
        source="""
import fcntl, os
kept, size = [], 0
try:
    while True:
        r, w = os.pipe()
        kept += r, w
        os.set_blocking(w, False)
        try:
            fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, 1 << 20)
        except OSError:
            pass
        try:
            while True: size += os.write(w, bytes(4096))
        except BlockingIOError:
            pass
except OSError:
    print("held" if len(kept) <= 64 and size <= 32 << 20 else (len(kept), size))
""",
    ),
    Attack(
        name="descriptors in flight",
        source="""
import errno, os, socket
a, b = socket.socketpair()
try:
    socket.send_fds(a, [b"x"], [0] * 100)
    print("sent")
except PermissionError:
    print("held")
""",
    ),
    Attack(
        name="attributes of the output",
        source="""
import os
for number in range(10**5):
    try:
        os.setxattr(1, f"user.{number}", bytes(60000))
    except PermissionError:
        print("held")
        break
""",
    ),
    Attack(
        name="as many small mappings as there can be, in every child",
        source=CALLS
        + """
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
start = libc.mmap(None, 600 << 20, 3, 0x22, -1, 0)
for number in range(10**5):
    if libc.mprotect(start + 8192 * number, 4096, 1):
        break
while True:
    try:
        if os.fork() == 0: time.sleep(100)
    except OSError:
        time.sleep(0.01)
""",
        prints="",
        ends=("cpu", "wall", "memory"),
    ),
    Attack(
        name="memory that may not be swapped",
        source=CALLS + "print(call('mlockall', 3) in (-errno.EPERM, -errno.ENOMEM))",
        prints="True\n",
    ),
    Attack(
        name="endless recursion without a limit",
        source="import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        prints="",
        ends=_ANY_END,
    ),
    Attack(
        name="the C stack",
        source="""
import functools, sys
sys.setrecursionlimit(10**9)
@functools.lru_cache(None)
def f(n): return f(n + 1)
f(0)
""",
        prints="",
        ends=_ANY_END,
    ),
)
