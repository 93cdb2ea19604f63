"""Measure what the sandbox costs: runs per second of a trivial program in it, against a bare Python process.

    python scripts/bench/sandbox.py [--runs 100] [--rounds 5] [--workers 2] [--json FILE]

The program is `print(input())`. Bare: `python -I -S -c` by subprocess.run, the least that running it can take.
One-shot: the same within bubblewrap. Sandbox: `coati_rl.sandbox.Sandbox.run`, one warm sandbox; with several
workers, one for each. Rounds are interleaved, each figure is the median over rounds. CPU time is that of this process
and of all that it starts, so that runs per CPU second are those of a core, however busy the machine is.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from coati_rl.sandbox import Limits, Sandbox

PROGRAM, INPUT, OUTPUT = "print(input())", b"some words of input\n", b"some words of input\n"
BARE = [os.path.realpath(sys.executable), "-I", "-S", "-c", PROGRAM]
WALLS = ["--unshare-all", "--as-pid-1", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
LIMITS = Limits()


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of one way to run the program; medians over rounds."""

    runs_per_s: float
    cpu_ms: float  # per run
    runs_per_cpu_s: float


def run_bare() -> None:
    """One process."""
    check(subprocess.run(BARE, input=INPUT, capture_output=True).stdout)


def run_one_shot() -> None:
    """One bubblewrap and one process."""
    command = [shutil.which("bwrap") or "bwrap", *WALLS, "--tmpfs", "/tmp", *BARE]
    check(subprocess.run(command, input=INPUT, capture_output=True).stdout)


def run_in(sandbox: Sandbox) -> None:
    """One program in a sandbox that is up."""
    check(sandbox.run(PROGRAM, stdin=INPUT, limits=LIMITS).output)


def check(output: bytes) -> None:
    """A run that gives something else is no run."""
    if output != OUTPUT:
        raise SystemExit(f"the program printed {output!r}")


def cpu_s() -> float:
    """CPU seconds of this process, of its children that have ended, and of those that live, with theirs."""
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    living = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(usage.ru_utime + usage.ru_stime for usage in ended) + sum(sum(times[:4]) for times in living)


def measure(run: Callable[[], object], num_runs: int) -> tuple[float, float]:
    """Seconds on the clock and of CPU time per run."""
    cpu_before, before = cpu_s(), time.perf_counter()
    run()
    return (time.perf_counter() - before) / num_runs, (cpu_s() - cpu_before) / num_runs


def measure_all(num_runs: int, num_rounds: int, num_workers: int) -> dict[str, Figures]:
    """Name -> figures, each way once a round."""
    sandboxes = [Sandbox() for _ in range(num_workers)]
    with ThreadPoolExecutor(num_workers) as threads:

        def repeat(run: Callable[[], None]) -> None:
            for _ in range(num_runs):
                run()

        def many(sandbox: Sandbox) -> None:
            repeat(lambda: run_in(sandbox))

        ways: dict[str, tuple[Callable[[], object], int]] = {
            "bare": (lambda: repeat(run_bare), num_runs),
            "one-shot bubblewrap": (lambda: repeat(run_one_shot), num_runs),
            "sandbox": (lambda: many(sandboxes[0]), num_runs),
            f"sandbox, {num_workers} workers": (lambda: list(threads.map(many, sandboxes)), num_runs * num_workers),
        }
        for sandbox in sandboxes:
            run_in(sandbox)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(num_rounds):
            for name, (run, count) in ways.items():
                times[name].append(measure(run, count))
    for sandbox in sandboxes:
        sandbox.close()
    return {name: figures_of(rounds) for name, rounds in times.items()}


def figures_of(rounds: list[tuple[float, float]]) -> Figures:
    """Medians."""
    clock_s, used_s = median(clock for clock, _ in rounds), median(used for _, used in rounds)
    return Figures(runs_per_s=1 / clock_s, cpu_ms=1000 * used_s, runs_per_cpu_s=1 / used_s)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Runs of a trivial program per second, with and without the sandbox.")
    parser.add_argument("--runs", type=int, default=100, help="of each way and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    all_figures = measure_all(arguments.runs, arguments.rounds, arguments.workers)
    bare = all_figures["bare"]
    print(f"{os.cpu_count()} cores, load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after")
    print(f"{'':<24}{'runs/s':>10}{'to bare':>10}{'CPU ms':>10}{'runs/CPU s':>12}{'to bare':>10}")
    for name, figures in all_figures.items():
        print(
            f"{name:<24}{figures.runs_per_s:10.1f}{figures.runs_per_s / bare.runs_per_s:10.2f}"
            f"{figures.cpu_ms:10.2f}{figures.runs_per_cpu_s:12.1f}{figures.runs_per_cpu_s / bare.runs_per_cpu_s:10.2f}"
        )
    if arguments.json:
        ways = {
            name: {"runs_per_s": figures.runs_per_s, "cpu_ms": figures.cpu_ms} for name, figures in all_figures.items()
        }
        written = {"runs": arguments.runs, "rounds": arguments.rounds, "load": load_before, "ways": ways}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
