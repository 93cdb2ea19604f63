"""Programs that look for what is not theirs: files, keys, the environment, other processes, the network.

Words between @ are places on the machine that the tests fill in: all of them exist, and hold or say a secret.
"""

from tests.integration.sandbox.attack import CALLS, Attack

_VARIABLES = ["HOME", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "TMPDIR"]

ATTACKS = (
    Attack(
        name="its own environment",
        source="import os; print(sorted(os.environ), sorted(os.environb))",
        prints=f"{_VARIABLES} {[name.encode() for name in _VARIABLES]}\n",
    ),
    Attack(
        name="environment and arguments of a program that it starts",
        source="""
import subprocess
print(subprocess.run(["env", "-u", "PWD", "-u", "SHLVL", "-u", "_"], capture_output=True).stdout.decode().count("="))
""",
        prints="6\n",
    ),
    Attack(
        name="everything in /proc",
        source="""
import os
found = os.listdir("/proc")
for pid in ["self", "thread-self", *range(1, 2000), @HOST_PID@, @SLEEPER_PID@]:
    for name in ("environ", "cmdline", "mem", "maps", "root", "cwd", "fd", "ns/net", "status"):
        if os.path.lexists(f"/proc/{pid}/{name}"):
            found.append((pid, name))
print(found)
""",
        prints="[]\n",
    ),
    Attack(
        name="what is left of the secret in its own memory",
        source="""
import ctypes, gc, sys
frames, frame = [], sys._getframe()
while frame is not None:
    frames.append(repr(frame.f_locals) + repr(frame.f_globals))
    frame = frame.f_back
text = " ".join(repr(kept) for kept in gc.get_objects()) + " ".join(frames) + repr(sys.argv) + repr(sys.orig_argv)
print("held" if "-".join(["coati", "secret"]) not in text else "found")
""",
    ),
    Attack(
        name="the environment block above its stack",
        source="""
import ctypes
libc = ctypes.CDLL(None)
environment = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
found, number = [], 0
while environment and environment[number]:
    found.append(environment[number])
    number += 1
print("held" if b"secret" not in b" ".join(found) else found)
""",
    ),
    Attack(
        name="files of the machine",
        source="""
import os
for path in ("@FILE@", "@PROJECT@/rewards/sandbox/box.py", "/etc/shadow", "/etc/passwd", "/etc/hostname", "/sys/kernel",
             "/var/log", "/run", "/boot", "/opt", "/srv", "/mnt", "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda"):
    if os.path.lexists(path):
        print(path)
print(sorted(os.listdir("/etc")), sorted(os.listdir("/dev")), os.listdir("/tmp"), os.listdir("/dev/shm"))
""",
        prints="['ld.so.cache'] ['full', 'null', 'random', 'shm', 'urandom'] ['solution.py'] []\n",
    ),
    Attack(
        name="homes, keys and tokens",
        source="""
import os
wanted = {".ssh", ".aws", ".netrc", ".gnupg", ".kube", ".config", ".git-credentials", ".pypirc", ".bash_history",
          ".docker", ".cache", "id_rsa", "id_ed25519"}
for folder, folders, files in os.walk("/"):
    found = wanted & {*folders, *files}
    if found:
        print(folder, found)
    skipped = folder in ("/usr", "/dev", "/proc", "/sandbox/packages") or folder.endswith("/lib")
    folders[:] = [] if skipped else folders
print("held")
""",
    ),
    Attack(
        name="folders that can be written to",
        source="""
import os, sys
for folder, folders, files in os.walk("/"):
    try:
        open(os.path.join(folder, "coati-test"), "w").close()
        print(folder)
    except OSError:
        pass
    folders[:] = [] if folder.count("/") > 2 or folder in ("/usr/share", "/usr/include") else folders
""",
        prints="/dev/shm\n/tmp\n",
    ),
    Attack(
        name="code that runs next time: site-packages, the standard library, the sandbox's own",
        source="""
import json, os, sys, sysconfig
sys.path.remove("/tmp")
for folder in [sysconfig.get_path("purelib"), os.path.dirname(json.__file__), *sys.path, "/sandbox", "/usr/lib", "/"]:
    for name in ("sitecustomize.py", "coati.pth", "json.py"):
        try:
            open(os.path.join(folder, name), "w").close()
            print("wrote", folder, name)
        except OSError:
            pass
for path in ("/sandbox/supervisor.py", "/sandbox/program.py", json.__file__, sys.executable, "/bin/sh"):
    for change in (
        lambda: open(path, "r+"), lambda: os.chmod(path, 0o777), lambda: os.unlink(path), lambda: os.utime(path),
        lambda: os.rename(path, path + "x"), lambda: os.truncate(path, 0), lambda: os.symlink(path, "/x"),
        lambda: os.link(path, "/tmp/x"), lambda: os.rename("/sandbox", "/tmp/sandbox"), lambda: os.rmdir("/tmp"),
    ):
        try:
            change()
            print("changed", path)
        except OSError:
            pass
print("held")
""",
    ),
    Attack(
        name="modules of the program's in the place of the sandbox's own, for the programs after it",
        source="""
import os, sys
for folder in sys.path:
    for name in ("json", "traceback", "program", "usage"):
        try:
            open(f"{folder}/{name}.py", "w").write("print('mine')")
        except OSError:
            pass
print([folder for folder in sys.path if os.path.exists(f"{folder}/usage.py")])
""",
        prints="['/tmp']\n",
    ),
    Attack(
        name="times of the devices, which all sandboxes share",
        source="""
import errno, os
found = os.stat("/dev/null").st_mtime_ns
for name in ("null", "full", "random", "urandom"):
    for change in (
        lambda: os.utime(f"/dev/{name}"), lambda: os.utime(f"/dev/{name}", (1, 2)),
        lambda: os.utime(os.open(f"/dev/{name}", os.O_WRONLY)), lambda: os.chmod(f"/dev/{name}", 0o600),
        lambda: os.open("/dev/null", os.O_WRONLY | os.O_TRUNC) and os.truncate(f"/dev/{name}", 0),
    ):
        try:
            change()
            print("changed", name)
        except OSError:
            pass
with open("/dev/null", "r+b", 0) as null:
    null.write(b"x")
    print("held" if null.read(1) == b"" and os.stat("/dev/null").st_mtime_ns == found else "changed")
""",
    ),
    Attack(
        name="locks, leases and watches of files that all sandboxes share",
        source=CALLS
        + """
import fcntl
import json
for path in ("/usr", json.__file__, sys.executable, "/dev/null", "/sandbox/program.py"):
    shared = os.open(path, os.O_RDONLY)
    print([
        *(attempt(fcntl.flock, shared, kind) for kind in (fcntl.LOCK_SH, fcntl.LOCK_EX | fcntl.LOCK_NB)),
        *(attempt(fcntl.fcntl, shared, command, 1) for command in (fcntl.F_NOTIFY, fcntl.F_SETLEASE)),
        *(attempt(fcntl.fcntl, shared, command, bytes(32)) for command in (5, 36, 37, 38, 1036, 1038)),
        attempt(fcntl.lockf, shared, fcntl.LOCK_EX | fcntl.LOCK_NB),
    ] == ["EPERM"] * 10 + ["EBADF"], end=" ")
print(attempt(fcntl.flock, os.open("/tmp", os.O_RDONLY), fcntl.LOCK_EX))
""",
        prints="True True True True True EPERM\n",
    ),
    Attack(
        name="the session's keys",
        source=CALLS
        + """
print(refused("keyctl", 0, -3, 0), refused("keyctl", 11, -3, 0, 0), refused("keyctl", 1, 0),
    refused("request_key", b"user", b"coati", 0, -3), refused("add_key", b"user", b"x", b"x", 1, -3))
""",
        prints="True True True True True\n",
    ),
    Attack(
        name="memory of other processes",
        source=CALLS
        + """
for pid in (1, @HOST_PID@, @SLEEPER_PID@):
    print(refused("ptrace", 16, pid, 0, 0), refused("process_vm_readv", pid, 0, 0, 0, 0, 0),
        attempt(open, f"/proc/{pid}/mem", "rb"))
print(refused("ptrace", 0, 0, 0, 0), refused("pidfd_getfd", os.pidfd_open(1), 0, 0))
""",
        prints="True True ENOENT\n" * 3 + "True True\n",
    ),
    Attack(
        name="inherited descriptors",
        source="""
import os
found = []
for descriptor in range(4096):
    try:
        found.append((descriptor, os.fstat(descriptor).st_mode & 0o170000 == 0o100000))
    except OSError:
        pass
print(found)
""",
        prints="[(0, True), (1, True), (2, True), (3, True)]\n",
    ),
    Attack(
        name="the machine's name",
        source="import os, socket; print(socket.gethostname(), os.uname().nodename)",
        prints="sandbox sandbox\n",
    ),
    Attack(
        name="a server on this machine over TCP and UDP, IPv4 and IPv6",
        source="""
import socket
for family in (socket.AF_INET, socket.AF_INET6):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            made = socket.socket(family, kind)
            made.connect(("127.0.0.1", @PORT@))
            print(made.recv(100))
        except PermissionError:
            print("held", end=" ")
try:
    print(socket.create_connection(("localhost", @PORT@)).recv(100))
except OSError as error:
    print("held")
""",
        prints="held held held held held held held\n",
    ),
    Attack(
        name="programs that go to the network by themselves",
        source="""
import subprocess
script = 'exec 3<>/dev/tcp/127.0.0.1/@PORT@ && cat <&3'
print(subprocess.run(["bash", "-c", script], capture_output=True, timeout=1).stdout)
""",
        prints="b''\n",
    ),
    Attack(
        name="a server on an abstract socket and on a socket file",
        source="""
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
    for address in ("\\0@ABSTRACT@", "@SOCKET_FILE@"):
        try:
            made = socket.socket(socket.AF_UNIX, kind)
            made.connect(address)
            print(made.recv(100))
        except (ConnectionRefusedError, FileNotFoundError):
            print("held", end=" ")
""",
        prints="held " * 6,
    ),
    Attack(
        name="every other family of sockets",
        source=CALLS
        + """
import socket
print([family for family in range(-1, 64) if family != 1
    and (attempt(socket.socket, family, 3) != "EPERM" or attempt(socket.socketpair, family, 1) != "EPERM")])
""",
        prints="[]\n",
    ),
    Attack(
        name="typing into a terminal",
        source=CALLS
        + """
import fcntl, termios
print([attempt(fcntl.ioctl, descriptor, termios.TIOCSTI, b"x") for descriptor in (0, 1, 2)],
    attempt(os.open, "/dev/tty", 2), attempt(os.open, "/dev/ptmx", 2), attempt(os.open, "/dev/console", 2))
""",
        prints="['ENOTTY', 'ENOTTY', 'ENOTTY'] ENOENT ENOENT ENOENT\n",
    ),
)
