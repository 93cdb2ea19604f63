"""Find a run's files in /tmp and /dev/shm, and check that other users cannot access them.

Other programs write to /tmp and /dev/shm, too. So a run sees directories of its own there (in a mount namespace; needs
no rights but those of making user namespaces), and all that appears in these is the run's.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
NOBODY = 65534
_LISTEN = "0A"  # in /proc/net/tcp
_ACCEPTS = 0x10000  # in the flags of /proc/net/unix
_ENTER = """
set -e
tmp=$1 shm=$2; shift 2
for path in "$tmp"/*; do mount --rbind "/tmp/${path##*/}" "$path"; done
mount --bind "$shm" /dev/shm
mount --rbind "$tmp" /tmp
exec setpriv --ambient-caps=-all --inh-caps=-all "$@"
"""


class OwnPlaces:
    """Directories that a run sees as /tmp and /dev/shm."""

    def __init__(self, run_dir: Path) -> None:
        """`run_dir`: of the run. Of the real /tmp, the run sees the folders that this and the project are in."""
        self._tmp = Path(tempfile.mkdtemp(prefix="own-", dir=run_dir.parent))
        self._shm = Path(tempfile.mkdtemp(prefix="test-", dir="/dev/shm"))
        paths = (run_dir, ROOT, Path(sys.prefix), Path(sys.base_prefix))
        self._seen = {self._tmp / path.parts[2] for path in paths if path.parts[:2] == ("/", "tmp")}
        for folder in self._seen:
            folder.mkdir()
        for folder in (self._tmp, self._shm):
            folder.chmod(0o1777)  # as the real ones: what keeps other users out has to be the run's

    def command(self, command: Iterable[str]) -> list[str]:
        """Run a command there; it keeps the process id."""
        rights = () if os.geteuid() == 0 else ("--user", "--map-current-user", "--keep-caps")
        return ["unshare", "--mount", *rights, "sh", "-c", _ENTER, "enter", str(self._tmp), str(self._shm), *command]

    def forget_ours(self, environment: dict[str, str]) -> None:
        """Take out what would lead the run to this process's temporary directory; importing torch may have set one."""
        for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
            if Path(environment.get(name, "")).is_relative_to(tempfile.gettempdir()):
                del environment[name]

    def left_over(self) -> list[Path]:
        """All that is there."""
        return [path for path in (*self._tmp.iterdir(), *self._shm.iterdir()) if path not in self._seen]

    def remove(self) -> None:
        """When the run has ended."""
        shutil.rmtree(self._shm, ignore_errors=True)


def listening_addresses(processes: Iterable[psutil.Process]) -> set[IPv4Address | IPv6Address]:
    """Return the addresses where processes listen, from /proc/net/tcp and tcp6 by the inodes of their sockets."""
    inodes = set(_sockets(processes))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[9]) in inodes:
                found.add(_address(fields[1].split(":")[0]))
    return found


def unix_listeners(processes: Iterable[psutil.Process]) -> set[str]:
    """The names of Unix sockets on which these processes listen; an abstract one begins with @."""
    inodes, found = set(_sockets(processes)), set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[6]) in inodes and int(fields[3], 16) & _ACCEPTS:
            found.add(fields[7])
    return found


def is_closed_to_others(process: psutil.Process, directory: Path) -> bool:
    """True if no other user can look into a directory as this process sees it. Root asks somebody else, others look at
    the modes.
    """
    if os.geteuid() != 0:
        path = Path(f"/proc/{process.pid}/root{directory}")
        return not all(part.stat().st_mode & stat.S_IXOTH for part in (path, *path.parents))
    somebody = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    command = ("nsenter", "--mount", f"--target={process.pid}", *somebody, "ls", str(directory))
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return told.returncode != 0 and "Permission denied" in told.stderr


def _sockets(processes: Iterable[psutil.Process]) -> Iterator[int]:
    for process in processes:
        for descriptor in _listed(Path(f"/proc/{process.pid}/fd")):
            with suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    yield int(target[8:-1])


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:  # the process has ended
        return []


def _address(text: str) -> IPv4Address | IPv6Address:
    """From hexadecimal words of 32 bits, each in the byte order of this machine."""
    words = [bytes.fromhex(text[start : start + 8]) for start in range(0, len(text), 8)]
    address = ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))
    return getattr(address, "ipv4_mapped", None) or address
