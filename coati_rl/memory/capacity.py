"""Read how much memory this machine has for a run: in total and available, at most the container's limit."""

import os
import re
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # bytes; version 1 of control groups has numbers near 2^63 for none


def total_bytes(*, proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Return the machine's memory, or the least limit of this process's control groups; see `available_bytes`."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(_limit(group) for group in _own_groups(proc, groups))])


def available_bytes(*, proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Return what new processes can take without swapping, bytes; None where the system does not say.

    That is the kernel's MemAvailable, or what the limit of this process's control group, or of one above it, leaves:
    the limit less what the group holds that cannot be reclaimed.

    Args:
        proc: where the kernel describes processes and memory.
        groups: where control groups are mounted.
    """
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(encoding="ascii"))
    except OSError:
        return None
    if found is None:
        return None
    return min([1024 * int(found[1]), *(_left(group) for group in _own_groups(proc, groups))])


def _own_groups(proc: Path, groups: Path) -> list[Path]:
    """Return the directories of this process's memory groups, of both versions, and of all above them."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        own = root / path.lstrip("/")
        # In a container the path is the host's, and the group's own directory is the root.
        found += [each for each in (own, *own.parents) if each.is_relative_to(root) and each.is_dir()]
    return found


def _left(group: Path) -> int:
    """Return what a group's limit leaves, bytes."""
    limit, used = _limit(group), _number(group, "memory.current", "memory.usage_in_bytes")
    if used is None or limit == _NO_LIMIT:
        return _NO_LIMIT
    return max(0, limit - used + _reclaimable(group))


def _limit(group: Path) -> int:
    """Return a group's limit, bytes."""
    limit = _number(group, "memory.max", "memory.limit_in_bytes")
    return _NO_LIMIT if limit is None else min(limit, _NO_LIMIT)


def _number(group: Path, *names: str) -> int | None:
    """Return the number in the first of these files that has one; None without a limit."""
    for name in names:
        try:
            text = (group / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _reclaimable(group: Path) -> int:
    """Return the cache of files in a group, bytes, which the kernel gives back when memory is short."""
    try:
        text = (group / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return 0
    fields = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
    names = ("total_inactive_file", "total_active_file") if "total_active_file" in fields else _FILE_FIELDS
    return sum(int(fields.get(name, 0)) for name in names)


_FILE_FIELDS = ("inactive_file", "active_file")
