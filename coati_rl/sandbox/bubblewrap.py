"""Build the command line that starts the supervisor inside the sandbox.

bubblewrap creates all namespaces (files, processes, network, hostname, shared memory, control groups) and a root that
holds /usr, this Python and its packages, all read-only, and nothing else of the machine. Its own environment is empty:
otherwise its process 1 would expose it in /proc/1/environ, --clearenv or not.

Started by root, it creates no user namespace: programs run as another, real user, because the kernel does not limit
root's processes. Started by another user, programs run as that user in a user namespace, without capabilities.
"""

import json
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

from coati_rl.errors import ConfigError
from coati_rl.sandbox.seccomp import seccomp_filter

_HERE = Path(__file__).parent
_INSIDE = ("supervisor.py", "child.py", "program.py", "interactive.py", "stopping.py", "usage.py")
_DEVICES = ("null", "full", "random", "urandom")  # no zero: a shared mapping of it is memory that counts for no process
_CAPABILITIES_OF_ROOT = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_KILL")


def sandbox_command(descriptor: int, *, user: int | None) -> list[str]:
    """Return the command that starts the supervisor inside the sandbox.

    Args:
        descriptor: the supervisor's end of the socket, to be inherited.
        user: id of the user that programs run as; None unless this process is root's.
    Raises: ConfigError when bubblewrap is missing, or the machine's architecture is not supported.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ConfigError(
            "code rewards run programs in bubblewrap, and bwrap is not installed: install it (Debian, Ubuntu: "
            "apt install bubblewrap), or run programs elsewhere with --code-verifier-api-url"
        )
    options = [
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--as-pid-1", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"),
        *_system(),
        *("--proc", "/proc", "--dir", "/tmp", "--dir", "/dev/shm"),
        *(word for name in _DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        *(word for name in _INSIDE for word in _bind(str(_HERE / name), f"/sandbox/{name}")),
        *("--remount-ro", "/", "--chdir", "/"),
        *("--setenv", "PYTHONHASHSEED", "0"),
    ]
    if user is not None:
        for capability in _CAPABILITIES_OF_ROOT:
            options += ["--cap-add", capability]
    else:
        # As user 0 of the namespace: for another one bubblewrap creates two nested ones, and capabilities in the inner
        # one do not hold in the outer, which owns the process namespace.
        options += ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "CAP_SYS_ADMIN"]
    return [bwrap, *options, *supervisor_command("/sandbox/supervisor.py", descriptor, user=user, is_isolated=True)]


def supervisor_command(path: str, descriptor: int, *, user: int | None, is_isolated: bool) -> list[str]:
    """Return the command that starts the supervisor. PYTHONHASHSEED is set, so that sets have one order in all runs."""
    settings = {
        "descriptor": descriptor,
        "seccomp": seccomp_filter(platform.machine()).hex() if is_isolated else "",
        "user": user,
        "is_isolated": is_isolated,
        "import_paths": list(_package_folders().values() if is_isolated else _package_folders()),
    }
    return [os.path.realpath(sys.executable), "-s", "-S", "-P", "-B", path, json.dumps(settings)]


def _system() -> list[str]:
    """Return the options that bind, read-only, the system's programs and libraries, this Python and its packages."""
    binds: list[str] = []
    for folder in ("/bin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(folder):
            binds += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            binds += _bind(folder, folder)
    python = os.path.realpath(sys.base_prefix)
    if python.startswith(("/tmp/", "/dev/")):
        raise ConfigError(
            f"code rewards run programs in a sandbox with its own /tmp and /dev, and this Python is in {python}: "
            "use a Python elsewhere"
        )
    for folder in ("/usr", "/etc/ld.so.cache", python):
        if os.path.exists(folder) and not folder.startswith("/usr/"):
            binds += _bind(folder, folder)
    if os.path.isdir("/usr/src") and not python.startswith("/usr/src/"):
        binds += ["--tmpfs", "/usr/src", "--remount-ro", "/usr/src"]  # where container images keep their sources
    for folder, inside in _package_folders().items():
        binds += _bind(folder, inside)
    return binds


def _bind(source: str, target: str) -> list[str]:
    """Bind a path read-only, and create the directories above it: bubblewrap would make them private to its user."""
    folders = [str(folder) for folder in reversed(Path(target).parents) if str(folder) != "/"]
    return [
        *(word for folder in folders for word in ("--perms", "0755", "--dir", folder)),
        *("--ro-bind", source, target),
    ]


def _package_folders() -> dict[str, str]:
    """Return the directories of packages, such as numpy, that solutions import, with their paths in the sandbox."""
    folders = dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    return {folder: f"/sandbox/packages/{number}" for number, folder in enumerate(folders)}
