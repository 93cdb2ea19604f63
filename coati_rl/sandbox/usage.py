"""Read from /proc the CPU time, memory and waiting of the processes of one program.

Imported by the supervisor alone, which looks every 20 ms. What /proc says of a process is gone with it, unless its
parent collects it, and a program decides on that (SIGCHLD ignored). So every thread's time is added up between two
looks, and one that was seen by a single look counts for as many as no look can have seen: on average the sum is right.
"""

import os
import time

_CPU_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_KIB = 1024
# Pages of its own, also when swapped out; with what its page tables take. Shared ones are files, whose size is bounded.
_MEMORY_FIELDS = (b"RssAnon:", b"VmPTE:", b"VmSwap:")


class Usage:
    """Of a program since its start.

    Args:
        proc: descriptor of a /proc that shows the program.
        child: its first process.
        is_alone: True if /proc shows nothing but the program and this process; else only `child` is looked at.
    """

    def __init__(self, proc: int, child: int, *, is_alone: bool) -> None:
        self.cpu_s = 0.0
        self.memory_bytes = 0  # at the last look
        self.num_threads = 0  # at the last look
        self.waited_s = 0.0  # on the clock: some thread could have run, but others had the cores
        self.wall_s = 0.0  # at the last look
        self._proc = proc
        self._child = str(child)
        self._is_alone = is_alone
        self._started = time.monotonic()
        self._seen_s = 0.0  # CPU time of all threads at all looks
        self._threads: dict[str, tuple[int, int]] = {}  # id: nanoseconds run, and waited for a core
        self._seen_once: dict[str, float] = {}  # by the last look, at work: CPU seconds of those it stands for

    def seconds(self) -> float:
        """On the clock, since the start."""
        return time.monotonic() - self._started

    def look(self) -> None:
        """Bring the fields up to date."""
        wall_s = self.seconds()
        interval_s, self.wall_s = wall_s - self.wall_s, wall_s
        ticks, memory_kib = 0, 0
        threads: dict[str, tuple[int, int]] = {}
        new_ones_at_work: set[str] = set()
        for process in self._processes():
            stat = self._read(f"{process}/stat").rsplit(b")", 1)[-1].split()
            ticks += sum(int(field) for field in stat[11:15])  # its own and its ended children's
            tasks = self._list(f"{process}/task")
            memory_kib += self._memory_kib(process, tasks)
            for thread in tasks:
                times = self._read(f"{process}/task/{thread}/schedstat").split()
                if len(times) == 3:  # else it has just ended
                    threads[thread] = int(times[0]), int(times[1])
                    if thread not in self._threads and self._is_at_work(f"{process}/task/{thread}/stat"):
                        new_ones_at_work.add(thread)
        self.memory_bytes, self.num_threads = memory_kib * _KIB, len(threads)
        self._add(threads, new_ones_at_work, interval_s)
        self.cpu_s = max(ticks * _CPU_TICK_S, self._seen_s)

    def _add(self, threads: dict[str, tuple[int, int]], new_ones_at_work: set[str], interval_s: float) -> None:
        run_s = sum(unseen_s for thread, unseen_s in self._seen_once.items() if thread not in threads)
        waited_s = 0.0
        for thread, (run, waited) in threads.items():
            run_before, waited_before = self._threads.get(thread, (0, 0))
            run_s += max(run - run_before, 0) / 1e9
            waited_s += max(waited - waited_before, 0) / 1e9
        self._seen_once = {}
        for thread in new_ones_at_work:
            run, waited = threads[thread]
            self._seen_once[thread] = max(interval_s * run / max(run + waited, 1) - run / 1e9, 0.0)
        self._threads = threads
        self._seen_s += run_s
        # While one of its threads runs, it is not the others who make the program wait.
        self.waited_s += min(waited_s, max(interval_s - run_s, 0.0))

    def _memory_kib(self, process: str, tasks: list[str]) -> int:
        """All threads say the same, but the first one nothing once it has ended."""
        for task in sorted(tasks, key=int):
            lines = self._read(f"{process}/task/{task}/status").splitlines()
            fields = [int(line.split()[1]) for line in lines if line.startswith(_MEMORY_FIELDS)]
            if fields:
                return sum(fields)
        return 0

    def _is_at_work(self, name: str) -> bool:
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
    """Return what a file in /proc says; nothing if its process has just ended."""
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
