"""Give a run a slow disk, a clock that is set, and a full /dev/shm, of its own: no other program notices.

Needs cc, and the right to make a mount namespace (root's; or that of making user namespaces).
"""

import contextlib
import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_SOURCE = Path(__file__).with_name("soak_faults.c")
_SHM_BYTES = 2**30  # of the run's own /dev/shm
_ENTER = 'mount -t tmpfs -o size="$0",mode=1777 tmpfs /dev/shm && exec "$@"'
SECONDS = (2.0, 12.0)  # for which a fault lasts
_FSYNC_S = (0.5, 3.0)
_STEP_S = 3600.0  # of the clock, at most, to and fro


class MachineFaults:
    """Hold what a run sees of its machine."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        """Build the library in `directory`. Raises: CalledProcessError or OSError without a compiler."""
        directory.mkdir(parents=True, exist_ok=True)
        self._library, self._file, self._rng = directory / "soak_faults.so", directory / "faults", rng
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", self._library, _SOURCE, "-ldl"], check=True)
        self._set()

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the run."""
        return {**os.environ, "LD_PRELOAD": str(self._library), "COATI_SOAK_FAULTS": str(self._file)}

    def command(self, command: list[str]) -> list[str]:
        """Return the command with a /dev/shm of its own; it keeps the process id."""
        rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        return ["unshare", "--mount", *rights, "sh", "-c", _ENTER, str(_SHM_BYTES), *command]

    def slow_disk(self) -> None:
        """Let each fsync take longer for a while."""
        self._set(fsync_s=self._rng.uniform(*_FSYNC_S))
        time.sleep(self._rng.uniform(*SECONDS))
        self._set()

    def set_clock(self) -> None:
        """Set the wall clock forward or back, and right again after a while."""
        self._set(offset_s=self._rng.uniform(-_STEP_S, _STEP_S))
        time.sleep(self._rng.uniform(*SECONDS))
        self._set()

    def fill_shm(self, process_id: int) -> None:
        """Fill the /dev/shm of a process for a while."""
        path = Path(f"/proc/{process_id}/root/dev/shm/filled")
        with _removed(path), path.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):  # no space left
                while True:
                    file.write(bytes(2**20))
            time.sleep(self._rng.uniform(*SECONDS))

    def _set(self, *, fsync_s: float = 0.0, offset_s: float = 0.0) -> None:
        values = struct.pack("<qq", int(fsync_s * 1e9), int(offset_s * 1e9))
        with self._file.open("r+b" if self._file.exists() else "wb", buffering=0) as file:
            file.write(values)


@contextlib.contextmanager
def _removed(path: Path) -> Iterator[None]:
    """Remove a file at the end; its namespace may have ended before."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
