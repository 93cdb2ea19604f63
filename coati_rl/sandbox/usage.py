"""Read from /proc the CPU time, memory and waiting time of the processes of one program.

Imported by the supervisor alone, which samples every 20 ms. The times of a process are lost with it, unless its parent
collects them, which the program decides (SIGCHLD ignored). So the time of every thread is added up between two samples,
and a thread seen in one sample only counts for those that ended between samples: on average the sum is right.
"""

import math
import os
import time

_CPU_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_KIB = 1024
# Private pages, also when swapped out, and page tables. Shared pages are files, whose size is bounded.
_MEMORY_FIELDS = (b"RssAnon:", b"VmPTE:", b"VmSwap:")


class Usage:
    """Sum up what a program has used since its start.

    Args:
        proc: descriptor of a /proc that shows the program.
        child: its first process.
        is_alone: True if /proc shows nothing but the program and this process; else only `child` is sampled.
    """

    def __init__(self, proc: int, child: int, *, is_alone: bool) -> None:
        self.cpu_s = 0.0
        self.memory_bytes = 0  # at the last sample
        self.num_threads = 0  # at the last sample
        self.waited_s = 0.0  # wall time in which a thread could have run, but other processes had the cores
        self.wall_s = 0.0  # at the last sample
        self._proc = proc
        self._child = str(child)
        self._is_alone = is_alone
        self._started = time.monotonic()
        self._cpu_before_s = 0.0  # the last restart
        self._seen_s = 0.0  # CPU time of all threads in all samples
        self._idle_s = 0.0  # wall time from the interval in which a thread last ran, without the waiting
        self._threads: dict[str, tuple[int, int]] = {}  # id: nanoseconds run, and waited for a core
        self._seen_once: dict[
            str, float
        ] = {}  # thread first seen running in the last sample -> CPU seconds of unseen ones

    def restart(self) -> None:
        """Count from now on, for a program that goes on."""
        self.sample()
        self._cpu_before_s += self.cpu_s
        self._started = time.monotonic()
        self.cpu_s = self.wall_s = self.waited_s = 0.0

    def seconds(self) -> float:
        """Return the wall time since the start."""
        return time.monotonic() - self._started

    def can_run(self) -> bool:
        """Return whether a thread runs, or waits for a core: the kernel counts a wait only when it ends."""
        return any(
            self._is_running(f"{process}/task/{thread}/stat")
            for process in self._processes()
            for thread in self._list(f"{process}/task")
        )

    def is_late(self, limit_s: float) -> bool:
        """Return whether it has taken longer, without its waits, and can run no more; if it can, other limits hold."""
        if self.wall_s - self.waited_s <= limit_s or self.can_run():
            return False
        self.sample()  # it may have run since the last sample, and only now its wait is counted
        return self.wall_s - self.waited_s > limit_s

    def sample(self) -> None:
        """Take a sample and update the fields."""
        wall_s = self.seconds()
        interval_s, self.wall_s = wall_s - self.wall_s, wall_s
        ticks, memory_kib = 0, 0
        threads: dict[str, tuple[int, int]] = {}
        new_running: set[str] = set()
        for process in self._processes():
            stat = self._read(f"{process}/stat").rsplit(b")", 1)[-1].split()
            ticks += sum(int(field) for field in stat[11:15])  # its own and its ended children's
            tasks = self._list(f"{process}/task")
            memory_kib += self._memory_kib(process, tasks)
            for thread in tasks:
                times = self._read(f"{process}/task/{thread}/schedstat").split()
                if len(times) == 3:  # else it has just ended
                    threads[thread] = int(times[0]), int(times[1])
                    if thread not in self._threads and self._is_running(f"{process}/task/{thread}/stat"):
                        new_running.add(thread)
        self.memory_bytes, self.num_threads = memory_kib * _KIB, len(threads)
        self._add(threads, new_running, interval_s)
        self.cpu_s = max(ticks * _CPU_TICK_S, self._seen_s) - self._cpu_before_s

    def _add(self, threads: dict[str, tuple[int, int]], new_running: set[str], interval_s: float) -> None:
        run_s = sum(unseen_s for thread, unseen_s in self._seen_once.items() if thread not in threads)
        waited_s = 0.0
        for thread, (run, waited) in threads.items():
            run_before, waited_before = self._threads.get(thread, (0, 0))
            run_s += max(run - run_before, 0) / 1e9
            waited_s += max(waited - waited_before, 0) / 1e9
        self._seen_once = {}
        for thread in new_running:
            run, waited = threads[thread]
            self._seen_once[thread] = max(interval_s * run / max(run + waited, 1) - run / 1e9, 0.0)
        self._threads = threads
        self._seen_s += run_s
        # While one of its threads runs, the program does not wait for other processes. The kernel adds a wait when it
        # ends, which may be many samples after its beginning.
        rest_s = max(interval_s - run_s, 0.0)
        waited_s = min(waited_s, self._idle_s + rest_s)
        self.waited_s += waited_s
        self._idle_s = min(self._idle_s + rest_s - waited_s, rest_s if run_s else math.inf)

    def _memory_kib(self, process: str, tasks: list[str]) -> int:
        """Return the private memory of a process. All threads report the same; an ended first one reports nothing."""
        for task in sorted(tasks, key=int):
            lines = self._read(f"{process}/task/{task}/status").splitlines()
            fields = [int(line.split()[1]) for line in lines if line.startswith(_MEMORY_FIELDS)]
            if fields:
                return sum(fields)
        return 0

    def _is_running(self, name: str) -> bool:
        return self._read(name).rsplit(b")", 1)[-1].split()[:1] == [b"R"]

    def _processes(self) -> list[str]:
        if not self._is_alone:
            return [self._child]
        own = str(os.getpid())
        return [name for name in os.listdir(self._proc) if name.isdigit() and name != own]

    def _list(self, name: str) -> list[str]:
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        except OSError:
            return []
        try:
            return os.listdir(descriptor)
        except OSError:
            return []
        finally:
            os.close(descriptor)

    def _read(self, name: str) -> bytes:
        return read(self._proc, name)


def read(proc: int, name: str) -> bytes:
    """Return the content of a file in /proc; nothing if its process has just ended."""
    try:
        descriptor = os.open(name, os.O_RDONLY, dir_fd=proc)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
