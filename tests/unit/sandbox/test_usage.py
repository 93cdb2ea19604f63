"""Test what a program has used, told from what /proc says at two or three looks. Here /proc is a folder of files."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from coati_rl.sandbox.usage import Usage

MS = 1_000_000  # nanoseconds
TICKS = os.sysconf("SC_CLK_TCK")


class Proc:
    """A /proc to write, and the clock at which it is looked at."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.now = 100.0
        self.descriptor = os.open(root, os.O_RDONLY)
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        (root / str(os.getpid())).mkdir()  # the supervisor's own: not counted
        (root / "meminfo").touch()
        self.usage = Usage(self.descriptor, 7, is_alone=True)

    def show(
        self, pid: int, *, cpu_s: float = 0.0, kib: int = 0, state: str = "S", threads: dict[int, tuple[int, int]]
    ) -> None:
        """A process; thread id -> milliseconds run, and waited for a core."""
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        stat = f"{pid} (a) R (b) {state} " + "0 " * 10 + f"{int(cpu_s * TICKS)} 0 0 0 20 0 1"
        (folder / "stat").write_text(stat)
        status = f"Name:\tVmSwap: 999\nVmPTE:\t{kib} kB\nVmSwap:\t{kib} kB\nRssAnon:\t{kib} kB\nRssShmem:\t77 kB\n"
        for thread, (run_ms, waited_ms) in threads.items():
            (folder / "task" / str(thread)).mkdir(parents=True, exist_ok=True)
            (folder / "task" / str(thread) / "schedstat").write_text(f"{run_ms * MS} {waited_ms * MS} 5\n")
            (folder / "task" / str(thread) / "stat").write_text(stat)
            (folder / "task" / str(thread) / "status").write_text(status)

    def end(self, pid: int) -> None:
        for path, folders, files in os.walk(self.root / str(pid), topdown=False):
            for name in files:
                os.unlink(os.path.join(path, name))
            for name in folders:
                os.rmdir(os.path.join(path, name))
        os.rmdir(self.root / str(pid))

    def sample(self, after_s: float) -> Usage:
        self.now += after_s
        self.usage.sample()
        return self.usage


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proc]:
    proc = Proc(tmp_path, monkeypatch)
    yield proc
    os.close(proc.descriptor)


def test_memory_is_the_sum_of_what_processes_have_of_their_own(proc: Proc) -> None:
    proc.show(7, kib=100, threads={7: (0, 0)})
    proc.show(8, kib=50, threads={8: (0, 0), 9: (0, 0)})
    usage = proc.sample(0.02)
    assert usage.memory_bytes == 3 * 150 * 1024  # anonymous, swapped, page tables; shared memory is files'
    assert usage.num_threads == 3


def test_memory_is_found_also_behind_a_first_thread_that_has_ended(proc: Proc) -> None:
    proc.show(7, kib=100, threads={7: (0, 0), 12: (0, 0)})
    (proc.root / "7" / "task" / "7" / "status").write_text("Name:\ta\nState:\tZ (zombie)\n")
    assert proc.sample(0.02).memory_bytes == 3 * 100 * 1024


def test_cpu_time_is_what_the_kernel_says_of_the_living_and_their_collected_children(proc: Proc) -> None:
    proc.show(7, cpu_s=0.5, threads={7: (10, 0)})
    proc.show(8, cpu_s=0.25, threads={8: (10, 0)})
    assert proc.sample(1.0).cpu_s == 0.75


def test_a_process_that_nobody_collected_is_not_forgotten(proc: Proc) -> None:
    proc.show(7, threads={7: (1, 0)})
    proc.show(8, cpu_s=0.4, threads={8: (200, 0)})
    proc.sample(0.2)
    proc.show(8, cpu_s=0.4, threads={8: (400, 0)})
    proc.sample(0.2)
    proc.end(8)
    assert proc.sample(0.02).cpu_s == pytest.approx(0.401)


def test_a_process_that_one_look_saw_at_work_counts_for_those_that_none_has_seen(proc: Proc) -> None:
    proc.show(7, threads={7: (0, 0)})
    proc.show(8, state="R", threads={8: (6, 2)})  # on a core for three quarters of its life
    proc.sample(0.02)
    proc.end(8)
    assert proc.sample(0.02).cpu_s == pytest.approx(0.75 * 0.02)


def test_a_process_that_one_look_saw_asleep_counts_for_itself(proc: Proc) -> None:
    proc.show(7, threads={7: (0, 0)})
    proc.show(8, state="S", threads={8: (6, 2)})
    proc.sample(0.02)
    proc.end(8)
    assert proc.sample(0.02).cpu_s == pytest.approx(0.006)


def test_a_process_that_stays_counts_for_itself(proc: Proc) -> None:
    proc.show(7, state="R", threads={7: (6, 0)})
    proc.sample(0.02)
    proc.show(7, state="R", threads={7: (26, 0)})
    assert proc.sample(0.02).cpu_s == pytest.approx(0.026)


def test_waiting_for_a_core_is_given_back_also_to_a_thread_that_another_waits_for(proc: Proc) -> None:
    proc.show(7, threads={7: (1, 0), 9: (100, 300)})
    usage = proc.sample(0.5)
    assert usage.waited_s == pytest.approx(0.3)
    proc.show(7, threads={7: (1, 0), 9: (150, 350)})
    assert proc.sample(0.2).waited_s == pytest.approx(0.35)


def test_waiting_for_a_core_that_another_thread_of_the_program_has_is_not(proc: Proc) -> None:
    proc.show(7, threads={7: (0, 1000), 8: (950, 50), 9: (0, 1000)})
    assert proc.sample(1.0).waited_s == pytest.approx(0.05)


def test_a_wait_that_lasts_many_samples_is_given_back_when_the_kernel_says_so(proc: Proc) -> None:
    """It adds a wait when it ends: here after 15 ms in one sample, 20 in each of two, and 5 in a fourth."""
    for times in ((5, 0), (5, 0), (5, 0), (20, 60)):
        proc.show(7, threads={7: times})
        usage = proc.sample(0.02)
    assert usage.waited_s == pytest.approx(0.06)


def test_the_time_before_a_program_ran_again_is_no_room_for_a_later_wait(proc: Proc) -> None:
    for times in ((0, 0), (20, 0), (20, 500)):
        proc.show(7, threads={7: times})
        usage = proc.sample(0.02 if times[0] else 1.0)
    assert usage.waited_s == pytest.approx(0.02)


@pytest.mark.parametrize(("states", "can_run"), [("SR", True), ("SS", False), ("TD", False)])
def test_a_program_can_run_if_one_of_its_threads_can(proc: Proc, states: str, can_run: bool) -> None:
    for pid, state in enumerate(states, start=7):
        proc.show(pid, state=state, threads={pid: (5, 0)})
    assert proc.sample(0.02).can_run() is can_run


def test_a_program_is_late_by_the_time_that_it_did_not_wait_for_a_core(proc: Proc) -> None:
    proc.show(7, state="R", threads={7: (10, 0)})
    assert not proc.sample(3.0).is_late(1.3), "a wait that goes on is not counted yet"
    proc.show(7, state="S", threads={7: (30, 2500)})  # it has run since the sample
    assert not proc.usage.is_late(1.3)
    proc.show(7, state="S", threads={7: (30, 2500)})
    assert proc.sample(1.0).is_late(1.3)


def test_sleeping_is_no_waiting(proc: Proc) -> None:
    proc.show(7, threads={7: (5, 0)})
    usage = proc.sample(2.0)
    assert (usage.wall_s, usage.waited_s) == (2.0, 0.0)


def test_a_process_that_ends_between_two_reads_is_nothing(proc: Proc) -> None:
    proc.show(7, cpu_s=0.1, threads={7: (100, 0)})
    (proc.root / "8" / "task" / "8").mkdir(parents=True)
    assert proc.sample(1.0).cpu_s == pytest.approx(0.1)
