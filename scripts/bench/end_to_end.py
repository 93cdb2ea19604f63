"""Measure completions per second of whole GRPO runs: `rl_example.py` with vLLM against TRL's GRPOTrainer.

    python scripts/bench/end_to_end.py [--settings uniform geometric] [--rounds 5] [--trl-threads 1 2] [--json FILE]
        [--prompts-per-step 8] [--group-size 8] [--rollout-prompts 16] [--flags "-nb 1"] [--steps N]
        [--trl-env ~/.cache/coati-rl/trl-venv]

A setting is a model of 374 thousand parameters made by `length_model.py`: with `uniform` all responses have 64 tokens;
with `geometric` a response ends with probability 1/61 at each token, and is cut at 448. Both sides train it with the
same prompts, steps, completions per step, temperature, reward function and loss, at a learning rate too small to change
it. Ours: the command line, one producer and one trainer with a core each, one rollout step (-ibs) ahead. TRL: its
trainer in one process with transformers' generation, in a separate environment that is created on first use; each given
number of threads is measured, and ours is compared with the fastest.

Each round runs every variant once, in new processes. Time is measured between the ends of two steps, without start-up,
the first steps (warm-up) and the last ones, in which nothing is generated. CPU time is of the same interval, for ours
by role, which shows the bottleneck. Figures are medians over rounds.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from timed_process import finish, running, wait_for_step

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
TRL_PINS = ("torch==2.13.0", "trl==1.16.0", "transformers==5.19.0", "datasets==5.2.0", "accelerate==1.15.0")
OURS = "Coati-RL"
LENGTH_TOLERANCE = 0.25  # of the mean over a run; 1400 geometric lengths vary by 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Hold lengths and numbers of steps, of which `warm_up` and `rest` are not counted."""

    name: str
    max_new_tokens: int
    mean_length: float
    steps: int
    warm_up: int = 4
    rest: int = 3

    @property
    def counted(self) -> tuple[int, int]:
        """Return the step whose end starts the measurement, and the last measured step, counted from 1."""
        return self.warm_up, self.steps - self.rest


SETTINGS = {
    "uniform": Setting(name="uniform", max_new_tokens=64, mean_length=64, steps=60),
    "geometric": Setting(name="geometric", max_new_tokens=448, mean_length=61, steps=30),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Hold the figures of one run's measured steps."""

    completions_per_s: float
    cpu_ms: dict[str, float]  # per completion, by role
    mean_length: float  # tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Hold the settings that all runs share."""

    prompts_per_step: int
    group_size: int
    rollout_prompts: int  # of ours: in flight, and between two weight syncs
    flags: tuple[str, ...]
    trl_python: Path
    scratch: Path

    def completions(self, setting: Setting) -> int:
        """Return the completions of the measured steps."""
        first, last = setting.counted
        return (last - first) * self.prompts_per_step * self.group_size


# --- ours -----------------------------------------------------------------------------------------------------------


def our_flags(bench: Bench, setting: Setting, run_dir: Path) -> list[str]:
    """Return flags for throughput: a rollout step's prompts in flight, one step ahead, few large micro-batches."""
    model, prompts, rollout = bench.scratch / setting.name, str(bench.prompts_per_step), str(bench.rollout_prompts)
    sizes = {"-ibs": rollout, "-imbs": rollout, "-tbs": prompts, "-tMbs": prompts}
    options = {
        **{"-m": str(model), "-d": str(model / "prompts.jsonl")},
        **{"-rt": f"{HERE / 'parity_reward.py'}:parity", "-s": ""},
        **{"-t": "1", "-i": "1", "-b": "vllm", "--device": "cpu", **sizes, "-nb": "1"},
        **{"-g": str(bench.group_size), "-tmbs": str(bench.prompts_per_step * bench.group_size)},
        **{"-mpt": "64", "-mnt": str(setting.max_new_tokens), "--max-steps": str(setting.steps), "-e": "2"},
        **{"-kl": "0", "-lr": "1e-9", "-si": "-1", "--master_port": "0", "--run-dir": str(run_dir)},
    }
    return [*(part for option in options.items() for part in option), *bench.flags]


def our_defaults() -> list[str]:
    """Return the available flags that increase throughput."""
    text = subprocess.run(
        [sys.executable, str(ROOT / "rl_example.py"), "--help"], capture_output=True, text=True
    ).stdout
    return [flag for flag in ("--inflight-update",) if flag in text]


def run_ours(bench: Bench, setting: Setting) -> Figures:
    """Run our command line once."""
    with TemporaryDirectory(dir=bench.scratch) as directory:
        metrics = Path(directory) / "run" / "metrics.jsonl"
        command = [sys.executable, str(ROOT / "rl_example.py"), *our_flags(bench, setting, metrics.parent)]
        with running(command, num_threads=1, log=Path(directory) / "log") as process:
            used = [wait_for_step(process, metrics, step) for step in setting.counted]
            finish(process)
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    ends_s = {record["step"]: record["time_s"] for record in records}
    (steps_before, before), (steps_after, after) = used
    seen = (steps_after - steps_before) * bench.prompts_per_step * bench.group_size
    first, last = setting.counted
    return Figures(
        completions_per_s=bench.completions(setting) / (ends_s[last] - ends_s[first]),
        cpu_ms={role: 1000 * (after[role] - before.get(role, 0.0)) / max(1, seen) for role in after},
        mean_length=sum(record["response_tokens_mean"] for record in records) / len(records),
    )


# --- TRL ------------------------------------------------------------------------------------------------------------


def ensure_trl(directory: Path) -> Path:
    """Return the Python of TRL's environment, which is created if it is missing or has other versions."""
    python, stamp, pins = directory / "bin" / "python", directory / "coati-pins.txt", "\n".join(TRL_PINS)
    if python.is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == pins:
        return python
    print(f"making {directory}: {' '.join(TRL_PINS)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, TRL_PINS[0]], check=True)  # first, so that a CPU build stays
    subprocess.run([*install, *TRL_PINS], check=True)
    stamp.write_text(pins, encoding="utf-8")
    return python


def run_trl(bench: Bench, setting: Setting, num_threads: int) -> Figures:
    """Run TRL's trainer once."""
    with TemporaryDirectory(dir=bench.scratch) as directory:
        result = Path(directory) / "result.json"
        options = {
            **{"--max-new-tokens": setting.max_new_tokens, "--steps": setting.steps, "--threads": num_threads},
            **{"--prompts-per-step": bench.prompts_per_step, "--group-size": bench.group_size, "--json": result},
        }
        flags = [str(part) for option in options.items() for part in option]
        command = [str(bench.trl_python), str(HERE / "trl_baseline.py"), str(bench.scratch / setting.name), *flags]
        with running(command, num_threads=num_threads, log=Path(directory) / "log") as process:
            finish(process)
        found = json.loads(result.read_text(encoding="utf-8"))
    first, last = (step - 1 for step in setting.counted)
    num_completions = bench.completions(setting)
    return Figures(
        completions_per_s=num_completions / (found["step_ends_s"][last] - found["step_ends_s"][first]),
        cpu_ms={"trainer": 1000 * (found["cpu_s"][last] - found["cpu_s"][first]) / num_completions},
        mean_length=found["mean_length"],
    )


# --- both -----------------------------------------------------------------------------------------------------------


def measure(bench: Bench, setting: Setting, num_rounds: int, trl_threads: list[int]) -> dict[str, list[Figures]]:
    """Run all variants in turn. Returns: the figures of each round by variant."""
    make = [sys.executable, str(HERE / "length_model.py"), str(bench.scratch / setting.name), "--lengths", setting.name]
    make += ["--num-prompts", str(setting.steps * bench.prompts_per_step)]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rounds: dict[str, list[Figures]] = {}
    ways: dict[str, Callable[[Bench, Setting], Figures]] = {OURS: run_ours}
    ways |= {f"TRL, {count} thread{'s'[: count > 1]}": partial(run_trl, num_threads=count) for count in trl_threads}
    for index in range(num_rounds):
        for name, run in ways.items():
            figures = run(bench, setting)
            if abs(figures.mean_length / setting.mean_length - 1) > LENGTH_TOLERANCE:
                raise SystemExit(f"{name}: {figures.mean_length:.1f} tokens a completion, not {setting.mean_length}")
            rounds.setdefault(name, []).append(figures)
            parts = ", ".join(f"{role} {cpu_ms:.2f}" for role, cpu_ms in figures.cpu_ms.items())
            speed = f"{setting.name}, round {index + 1}, {name}: {figures.completions_per_s:.1f}/s"
            print(f"{speed}; CPU ms a completion: {parts}", flush=True)
    return rounds


def table(rounds: dict[str, list[Figures]]) -> list[str]:
    """Format a line per variant with medians and the ratio to the fastest variant of TRL."""
    speeds = {name: median(one.completions_per_s for one in figures) for name, figures in rounds.items()}
    peer = max((name for name in speeds if name != OURS), key=lambda name: speeds[name])
    lines = [f"{'':<16}{'completions/s':>14}{'lowest':>9}{'highest':>9}{'CPU ms each':>13}{'tokens':>8}{'ratio':>7}"]
    for name, figures in rounds.items():
        each = [one.completions_per_s for one in figures]
        cpu_ms = median(sum(one.cpu_ms.values()) for one in figures)
        lines.append(
            f"{name:<16}{speeds[name]:14.1f}{min(each):9.1f}{max(each):9.1f}{cpu_ms:13.2f}"
            f"{median(one.mean_length for one in figures):8.1f}{speeds[name] / speeds[peer]:7.2f}"
        )
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Completions per second of whole runs, against TRL's GRPOTrainer.")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rollout-prompts", type=int, default=16, help="our -ibs and -imbs; a multiple of the former")
    parser.add_argument("--steps", type=int, help="of a run, at least 9; default: 60 and 30")
    parser.add_argument("--trl-threads", type=int, nargs="+", default=[1, 2], help="each is a way to run TRL")
    parser.add_argument("--trl-env", type=Path, default=Path("~/.cache/coati-rl/trl-venv"), help="made if missing")
    parser.add_argument("--flags", help="of ours, besides; default: --inflight-update if there is one")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 9:
        parser.error(f"--steps {arguments.steps}: 7 of them are not counted, so that 9 is the least")
    flags = our_defaults() if arguments.flags is None else shlex.split(arguments.flags)
    trl_python = ensure_trl(arguments.trl_env.expanduser().absolute())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running run is ended first
    load_before = os.getloadavg()[0]
    all_rounds: dict[str, dict[str, list[Figures]]] = {}
    with TemporaryDirectory(prefix="end-to-end-") as scratch:
        bench = Bench(
            prompts_per_step=arguments.prompts_per_step,
            group_size=arguments.group_size,
            rollout_prompts=arguments.rollout_prompts,
            flags=tuple(flags),
            trl_python=trl_python,
            scratch=Path(scratch),
        )
        for name in arguments.settings:
            setting = replace(SETTINGS[name], steps=arguments.steps or SETTINGS[name].steps)
            all_rounds[name] = measure(bench, setting, arguments.rounds, arguments.trl_threads)
    print(f"\n{os.cpu_count()} cores, load {load_before:.1f} before; ours with {shlex.join(flags)}")
    for name, rounds in all_rounds.items():
        print("\n".join([f"\n{name}", *table(rounds)]))
    if arguments.json:
        sizes = {"prompts_per_step": bench.prompts_per_step, "group_size": bench.group_size}
        sizes |= {"rollout_prompts": bench.rollout_prompts}
        written = {
            name: {way: [*map(asdict, runs)] for way, runs in rounds.items()} for name, rounds in all_rounds.items()
        }
        everything = {**sizes, "flags": flags, "trl": TRL_PINS, "load": load_before, "settings": written}
        arguments.json.write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
