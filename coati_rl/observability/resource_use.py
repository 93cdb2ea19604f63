"""Measure what a process takes of its machine: cores, memory, and what is in use of its GPU's memory."""

import sys
import time
from contextlib import suppress

import psutil

GIB = 2**30


class ResourceUse:
    """Sample a process, with its descendants or alone."""

    def __init__(self, *, has_descendants: bool) -> None:
        """Begin to count.

        Args:
            has_descendants: whether the processes below this one count as its own: reward workers, engine ranks.
        """
        self._process, self._has_descendants = psutil.Process(), has_descendants
        self._cpu_s: dict[int, float] = {}  # of each process that lived at the last sample
        self._at = time.perf_counter()
        self.sample()

    def sample(self) -> dict[str, float]:
        """Return what is taken now, by name.

        Returns: `cores`, CPU seconds a second since the last sample, without those of processes that have ended since;
            `memory_gib`, private memory; `gpu_memory_gib`, in use on this process's GPU by whatever process, if it has
            begun to use one.
        """
        memory, cpu_s = 0, dict[int, float]()
        for process in self._processes():
            with suppress(psutil.Error):
                with process.oneshot():
                    times, sizes = process.cpu_times(), process.memory_info()
                cpu_s[process.pid] = times.user + times.system
                memory += sizes.rss - getattr(sizes, "shared", 0)
        now = time.perf_counter()
        spent = sum(max(0.0, used - self._cpu_s.get(pid, 0.0)) for pid, used in cpu_s.items())
        found = {"cores": spent / max(now - self._at, 1e-9), "memory_gib": memory / GIB}
        self._cpu_s, self._at = cpu_s, now
        return found | _gpu_memory()

    def _processes(self) -> list[psutil.Process]:
        if not self._has_descendants:
            return [self._process]
        with suppress(psutil.Error):
            return [self._process, *self._process.children(recursive=True)]
        return [self._process]


def _gpu_memory() -> dict[str, float]:
    """Return what is in use of the device that this process has initialised; torch is not imported for it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # None while another thread imports torch
    if cuda is None or not cuda.is_initialized():
        return {}
    with suppress(RuntimeError):  # of a device that has failed: what the process did until then is still recorded
        free, total = cuda.mem_get_info()
        return {"gpu_memory_gib": (total - free) / GIB}
    return {}
