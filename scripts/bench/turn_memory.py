"""Measure the memory of runs in which an engine and a trainer have devices of their own, or share them in turns.

    OMP_NUM_THREADS=1 python scripts/bench/turn_memory.py --model DIR --dataset FILE [--picture FILE] [--json FILE]

The same GRPO run is made twice, without and with `--colocate`, one trainer and one vLLM engine on the CPU. Memory is
the proportional set size (PSS) of all processes of a run, sampled over time: pages that several processes share are
counted once. It holds mapped files such as libraries, which the kernel can drop; their part is given apart. Files that
a process reads and writes without mapping them, such as offloaded weights, are in the page cache and not in it. Printed
are the peaks of each turn by kind of process, the ratio of the peaks, the seconds of a step, and those of each part of
a hand-over, from the run's timeline. Other programs change the seconds, not the memory.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import psutil

matplotlib.use("Agg")  # write files without opening a window
from matplotlib import pyplot

from coati_rl.observability.timeline import now_ns

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 1800.0
PAUSE_S = 0.1  # between two samples
GIB = 2**30
KINDS = {"ray::TrainerActor": "trainer", "ray::ProducerActor": "engine"}
REST = "Ray, driver and coordinator"
NAMES = [*KINDS.values(), REST]
TURNS = ("producers", "trainers")
PARTS = ("engines go to sleep", "onload", "offload", "commit weights")  # spans of a hand-over
SIZES = {
    **{"-ibs": 4, "-imbs": 4, "-tbs": 4, "-tMbs": 4, "-g": 4, "-tmbs": 4, "-mpt": 128, "-mnt": 64},
    **{"-kl": 0, "-nb": 0, "-t": 1, "-i": 1, "-b": "vllm", "--device": "cpu", "-rt": "boxed", "--seed": 0},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Hold the memory of a run's processes at a time, in bytes."""

    time_ns: int
    pss: dict[str, int]  # by kind of process
    file: int  # mapped files, of all
    cpu_s: dict[int, float]  # so far, by process

    @property
    def total(self) -> int:
        """Return the memory of all processes."""
        return sum(self.pss.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Hold a span of a run's timeline."""

    name: str
    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Hold what a run has shown."""

    samples: list[Sample]
    spans: list[Span]
    step_s: list[float]

    def turn(self, time_ns: int) -> str | None:
        """Return whose turn it is; None in the change, and where there are no turns."""
        changes = [span for span in self.spans if span.name in ("to trainers", "to producers")]
        if any(span.begin_ns <= time_ns < span.end_ns for span in changes):
            return None
        before = [span for span in changes if span.end_ns <= time_ns]
        if not changes or not before:
            return TURNS[0] if changes else None
        return max(before, key=lambda span: span.end_ns).name.removeprefix("to ")

    def cpu_s(self) -> float:
        """Return the CPU time of all processes in the optimizer steps' time, with what is between them."""
        begin = min(span.begin_ns for span in self.spans if span.name == "sync")
        end = max(span.end_ns for span in self.spans if span.name == "train")
        inside = [each for each in self.samples if begin <= each.time_ns <= end]
        first, last = dict[int, float](), dict[int, float]()
        for sample in inside:
            for pid, seconds in sample.cpu_s.items():
                first.setdefault(pid, seconds)
                last[pid] = seconds
        return sum(last.values()) - sum(first.values())

    def peak(self, turn: str | None = None, of: str | None = None) -> int:
        """Return the largest memory, in a turn if one is named, of all processes or of a kind."""
        return max(
            each.pss[of] if of else each.total
            for each in self.samples
            if turn is None or self.turn(each.time_ns) == turn
        )


def memory_of(root: psutil.Process) -> Sample:
    """Return the memory of a process and of all below it."""
    now, pss, file, cpu_s = now_ns(), dict.fromkeys(NAMES, 0), 0, dict[int, float]()
    for process in [root, *root.children(recursive=True)]:
        with suppress(OSError, psutil.Error):  # it has ended
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
            found = {line.split()[0].rstrip(":"): 1024 * int(line.split()[1]) for line in lines}
            command = " ".join(process.cmdline())
            kind = next((name for start, name in KINDS.items() if command.startswith(start)), REST)
            pss[kind] += found["Pss"]
            file += found["Pss_File"]
            times = process.cpu_times()
            cpu_s[process.pid] = times.user + times.system
    return Sample(time_ns=now, pss=pss, file=file, cpu_s=cpu_s)


def run(arguments: argparse.Namespace, directory: Path, *more: str) -> Measured:
    """Train, and sample the memory meanwhile. Raises: SystemExit with the output of a run that failed."""
    flags = [str(part) for pair in SIZES.items() for part in pair]
    command = [
        *(sys.executable, "rl_example.py", "-m", str(arguments.model), "-d", str(arguments.dataset), *flags),
        *("--precision", arguments.precision, "--max-steps", str(arguments.steps), "-si", "-1"),
        *("--run-dir", str(directory), *more),
    ]
    environment, samples = {**os.environ, "HF_HUB_OFFLINE": "1"}, []
    log = directory.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=REPOSITORY)
        try:
            root, deadline = psutil.Process(process.pid), time.monotonic() + RUN_TIMEOUT_S
            while process.poll() is None and time.monotonic() < deadline:
                samples.append(memory_of(root))
                time.sleep(PAUSE_S)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        sys.exit(log.read_text(encoding="utf-8", errors="replace"))
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return Measured(samples=samples, spans=[*read_spans(directory)], step_s=[row["step_s"] for row in rows])


def read_spans(run_dir: Path) -> Iterator[Span]:
    """Yield the spans that a run's trainers and producers have recorded."""
    for path in sorted((run_dir / "timeline").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            event: dict[str, Any] = json.loads(line) if line else {}
            if event.get("ph") == "X":
                yield Span(name=event["name"], begin_ns=event["begin_ns"], end_ns=event["end_ns"])


def figures_of(measured: Measured) -> dict[str, Any]:
    """Return the peaks in GiB and medians of seconds."""
    top = max(measured.samples, key=lambda sample: sample.total)
    found: dict[str, Any] = {
        "peak": measured.peak() / GIB,
        "at the peak": {**{name: top.pss[name] / GIB for name in NAMES}, "of it mapped files": top.file / GIB},
        "step_s": median(measured.step_s[1:] or measured.step_s),
        "cpu_s_per_step": measured.cpu_s() / len(measured.step_s),
    }
    spans = {name: [span.seconds for span in measured.spans if span.name == name] for name in PARTS}
    if any(span.name == "to trainers" for span in measured.spans):
        for turn in TURNS:
            found[turn] = {"all": measured.peak(turn) / GIB}
            for name in NAMES:
                found[turn][name] = measured.peak(turn, name) / GIB
        found["hand_over_s"] = {name: [min(each), median(each), max(each)] for name, each in spans.items() if each}
    else:
        found["peaks"] = {name: measured.peak(None, name) / GIB for name in NAMES}
    return found


def draw(runs: Sequence[tuple[str, Measured]], path: Path) -> None:
    """Draw memory over time, stacked by kind of process; the trainers' turns are shaded."""
    figure, axes = pyplot.subplots(len(runs), 1, figsize=(9, 5.6), sharey=True, sharex=True, layout="constrained")
    for axis, (title, measured) in zip(axes, runs, strict=True):
        begin = measured.samples[0].time_ns
        seconds = [(each.time_ns - begin) / 1e9 for each in measured.samples]
        axis.stackplot(
            seconds, *([each.pss[name] / GIB for each in measured.samples] for name in NAMES), labels=NAMES, alpha=0.85
        )
        axis.axhline(measured.peak() / GIB, color="black", linewidth=0.8, linestyle="--")
        axis.fill_between(
            seconds,
            0,
            1,
            where=[measured.turn(each.time_ns) == "trainers" for each in measured.samples],
            transform=axis.get_xaxis_transform(),
            color="grey",
            alpha=0.2,
            label="trainers' turn" if measured.turn(measured.samples[-1].time_ns) else None,
        )
        axis.set_title(f"{title}: at most {measured.peak() / GIB:.2f} GiB", loc="left", fontsize=10)
        axis.set_ylabel("GiB (PSS)")
    axes[-1].set_xlabel("seconds")
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)


def show(name: str, found: dict[str, Any]) -> None:
    """Print the figures of a run."""
    print(
        f"{name}: peak {found['peak']:.2f} GiB, a step {found['step_s']:.1f} s, {found['cpu_s_per_step']:.1f} s of CPU",
        flush=True,
    )
    for key, value in found.items():
        if isinstance(value, dict):
            shown = "; ".join(
                f"{part} {'/'.join(f'{each:.2f}' for each in (one if isinstance(one, list) else [one]))}"
                for part, one in value.items()
            )
            print(f"  {key}: {shown}")


def main() -> None:
    """Measure, print, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--dataset", type=Path, required=True, help="JSON lines, as of rl_example.py")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of each run (default 4)")
    parser.add_argument("--only", choices=["apart", "in turns"], help="one run")
    parser.add_argument("--keep", type=Path, help="new directory for the runs' files, kept")
    parser.add_argument("--picture", type=Path, help="draw memory over time to this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    root = arguments.keep or Path(tempfile.mkdtemp())
    root.mkdir(exist_ok=True)
    runs = []
    try:
        for name, more in (("apart", ()), ("in turns", ("--colocate",))):
            if arguments.only in (None, name):
                runs.append((name, run(arguments, root / name.replace(" ", "-"), *more)))
                show(name, figures_of(runs[-1][1]))
    finally:
        if arguments.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    figures = {name: figures_of(measured) for name, measured in runs}
    if len(figures) > 1:
        turns = figures["in turns"]
        larger = max(turns[turn]["all"] for turn in TURNS)
        print(
            f"in turns / apart: memory {turns['peak'] / figures['apart']['peak']:.3f}, "
            f"seconds of a step {turns['step_s'] / figures['apart']['step_s']:.2f}, of CPU "
            f"{turns['cpu_s_per_step'] / figures['apart']['cpu_s_per_step']:.2f}; "
            f"peak / larger turn {turns['peak'] / larger:.3f}"
        )
        if arguments.picture:
            draw(runs, arguments.picture)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
