"""Measure completions per second of whole GRPO runs: `rl_example.py` with vLLM against TRL's GRPOTrainer.

    python scripts/bench/end_to_end.py [--workloads uniform geometric] [--rounds 5] [--trl-threads 1 2] [--json FILE]
        [--model DIR] [--problems FILE] [--prompts-per-step 8] [--group-size 8] [--rollout-prompts N] [--steps N]
        [--flags "-nb 1"] [--trl-env ~/.cache/coati-rl/trl-venv]

Workloads are in `workloads.py`. Toy ones have a model of 374 thousand parameters: with `uniform` all responses have 64
tokens; with `geometric` a response ends with probability 1/61 at each token, and is cut at 448. With `gsm8k` and
`long_prompts` the pretrained model of `--model` writes 128 tokens for each arithmetic problem, which `long_prompts`
fills to 500 tokens, and all rewards of a group differ; with `real_rewards` it ends where it likes, after 128 tokens at
most, and is paid for the right number. Both sides train the same prompts, steps, completions per step, temperature,
reward function and loss in float32, at a learning rate too small to change the model. Ours: the command line, one
producer and one trainer with a core each, one rollout step (-ibs) ahead. TRL: its trainer in one process with
transformers' generation, in a separate environment that is created on first use; each given number of threads is
measured, and ours is compared with the fastest.

Each round measures every variant once, one after the other. Ours is started anew, and measured between the ends of two
steps, without start-up, the first steps (warm-up) and the last ones, in which nothing is generated and for which nobody
waits. TRL's process is kept: it has as many steps of warm-up, and does not run while another is measured. CPU time is
of the same interval, for ours by role, which shows the bottleneck. Token counts are of all steps so far, and so is
TRL's share of groups with equal rewards; ours is of the measured steps. Figures are medians over rounds.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from timed_process import continue_until_stopped, running, wait_for_step
from trl_environment import DIRECTORY, TRL_PINS, ensure_trl
from workloads import PROBLEMS, WORKLOADS, Workload, make_workload, share_of_constant_groups

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
OURS = "Coati-RL"
LENGTH_TOLERANCE = 0.25  # of the mean over a run; 1400 geometric lengths vary by 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Hold the figures of one run's measured steps."""

    completions_per_s: float
    cpu_ms: dict[str, float]  # per completion, by role
    mean_length: float  # tokens
    constant_groups: float  # share of groups with equal rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Hold the settings that all runs share."""

    prompts_per_step: int
    group_size: int
    flags: tuple[str, ...]
    trl_python: Path
    scratch: Path

    def completions(self, workload: Workload) -> int:
        """Return the completions of the measured steps."""
        first, last = workload.counted
        return (last - first) * self.prompts_per_step * self.group_size


# --- ours -----------------------------------------------------------------------------------------------------------


def our_flags(bench: Bench, workload: Workload, run_dir: Path) -> list[str]:
    """Return flags for throughput: a rollout step's prompts in flight, one step ahead, few large micro-batches."""
    model, prompts, rollout = bench.scratch / workload.name, str(bench.prompts_per_step), str(workload.rollout_prompts)
    sizes = {"-ibs": rollout, "-imbs": rollout, "-tbs": prompts, "-tMbs": prompts}
    options = {
        **{"-m": str(model), "-d": str(model / "prompts.jsonl")},
        **{"-rt": f"{HERE / 'bench_rewards.py'}:{workload.reward}", "-s": ""},
        **{"-t": "1", "-i": "1", "-b": "vllm", "--device": "cpu", **sizes, "-nb": "1"},
        **{"-g": str(bench.group_size), "-tmbs": str(bench.prompts_per_step * bench.group_size)},
        **{"-mpt": str(workload.max_prompt_tokens), "-mnt": str(workload.max_new_tokens)},
        **{"--max-steps": str(workload.steps), "-e": "2"},
        **{"-kl": "0", "-lr": "1e-9", "-si": "-1", "--master_port": "0", "--run-dir": str(run_dir)},
    }
    if workload.our_micro_batch_tokens is not None:
        options["--max-tokens-per-microbatch"] = str(workload.our_micro_batch_tokens)
    return [*(part for option in options.items() for part in option), *bench.flags]


def our_defaults() -> list[str]:
    """Return the available flags that increase throughput."""
    text = subprocess.run(
        [sys.executable, str(ROOT / "rl_example.py"), "--help"], capture_output=True, text=True
    ).stdout
    return [flag for flag in ("--inflight-update",) if flag in text]


def run_ours(bench: Bench, workload: Workload) -> Figures:
    """Run our command line once."""
    with TemporaryDirectory(dir=bench.scratch) as directory:
        metrics = Path(directory) / "run" / "metrics.jsonl"
        command = [sys.executable, str(ROOT / "rl_example.py"), *our_flags(bench, workload, metrics.parent)]
        with running(command, num_threads=1, log=Path(directory) / "log") as process:
            wait = partial(wait_for_step, process, metrics, timeout_s=workload.timeout_s)
            used = [wait(step) for step in workload.counted]  # the steps after them are not waited for
        rollouts = metrics.parent / "rollouts"
        samples = (json.loads(line) for file in rollouts.iterdir() for line in file.open(encoding="utf-8"))
        first, last = workload.counted
        counted = [sample for sample in samples if first < sample["step"] <= last]
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").split("\n")[:-1]]
    ends_s = {record["step"]: record["time_s"] for record in records}
    (steps_before, before), (steps_after, after) = used
    seen = (steps_after - steps_before) * bench.prompts_per_step * bench.group_size
    return Figures(
        completions_per_s=bench.completions(workload) / (ends_s[last] - ends_s[first]),
        cpu_ms={role: 1000 * (after[role] - before.get(role, 0.0)) / max(1, seen) for role in after},
        mean_length=sum(record["response_tokens_mean"] for record in records) / len(records),
        constant_groups=share_of_constant_groups(counted),
    )


# --- TRL ------------------------------------------------------------------------------------------------------------


@contextmanager
def trl_rounds(
    bench: Bench, workload: Workload, num_rounds: int, num_threads: int
) -> Iterator[Callable[[Bench, Workload], Figures]]:
    """Start TRL's trainer, which does not run between two rounds. Yields: a function that runs a round."""
    with TemporaryDirectory(dir=bench.scratch) as directory:
        result = Path(directory) / "result.json"
        first, last = workload.counted
        options = {
            **{"--max-new-tokens": workload.max_new_tokens, "--threads": num_threads},
            **{"--prompts-per-step": bench.prompts_per_step, "--group-size": bench.group_size, "--json": result},
            **{"--reward": workload.reward, "--warm-up": first, "--stop-every": last - first},
            **{"--steps": first + num_rounds * (last - first)},  # on-policy: each step generates
            **({"--micro-batch": workload.trl_micro_batch} if workload.trl_micro_batch else {}),
        }
        flags = [str(part) for option in options.items() for part in option]
        command = [str(bench.trl_python), str(HERE / "trl_baseline.py"), str(bench.scratch / workload.name), *flags]
        with running(command, num_threads=num_threads, log=Path(directory) / "log") as process:
            continue_until_stopped(process, timeout_s=workload.timeout_s)
            yield partial(run_trl, process, result)


def run_trl(process: subprocess.Popen[bytes], result: Path, bench: Bench, workload: Workload) -> Figures:
    """Let TRL's trainer run until it stops itself; the figures are of the steps since then."""
    continue_until_stopped(process, timeout_s=workload.timeout_s)
    found = json.loads(result.read_text(encoding="utf-8"))
    first, last = workload.counted
    steps, num_completions = slice(first - last, None), bench.completions(workload)
    return Figures(
        completions_per_s=num_completions / sum(found["step_s"][steps]),
        cpu_ms={"trainer": 1000 * sum(found["cpu_s"][steps]) / num_completions},
        mean_length=found["mean_length"],
        constant_groups=found["constant_groups"],
    )


# --- both -----------------------------------------------------------------------------------------------------------


def measure(bench: Bench, workload: Workload, num_rounds: int, trl_threads: list[int]) -> dict[str, list[Figures]]:
    """Run all variants in turn. Returns: the figures of each round by variant."""
    rounds: dict[str, list[Figures]] = {}
    ways: dict[str, Callable[[Bench, Workload], Figures]] = {OURS: run_ours}
    with ExitStack() as processes:
        for count in trl_threads:
            trl = trl_rounds(bench, workload, num_rounds, count)
            ways[f"TRL, {count} thread{'s'[: count > 1]}"] = processes.enter_context(trl)
        for index in range(num_rounds):
            for name, run in ways.items():
                figures = run(bench, workload)
                check(name, figures, workload)
                rounds.setdefault(name, []).append(figures)
                parts = ", ".join(f"{role} {cpu_ms:.2f}" for role, cpu_ms in figures.cpu_ms.items())
                speed = f"{workload.name}, round {index + 1}, {name}: {figures.completions_per_s:.3f}/s"
                print(f"{speed}; CPU ms a completion: {parts}", flush=True)
    return rounds


def check(name: str, figures: Figures, workload: Workload) -> None:
    """Compare a run with its workload. Raises: SystemExit."""
    expected = workload.mean_length
    if expected is not None and abs(figures.mean_length / expected - 1) > LENGTH_TOLERANCE:
        raise SystemExit(f"{name}: {figures.mean_length:.1f} tokens a completion, not {expected}")
    if workload.is_always_varied and figures.constant_groups:
        raise SystemExit(f"{name}: {100 * figures.constant_groups:.1f} % of the groups have equal rewards")


def table(rounds: dict[str, list[Figures]]) -> list[str]:
    """Format a line per variant with medians and the ratio to the fastest variant of TRL."""
    speeds = {name: median(one.completions_per_s for one in figures) for name, figures in rounds.items()}
    peer = max((name for name in speeds if name != OURS), key=lambda name: speeds[name])
    titles = {"completions/s": 14, "lowest": 9, "highest": 9, "CPU ms each": 13, "tokens": 8, "equal rewards": 15}
    lines = [f"{'':<16}{''.join(f'{title:>{width}}' for title, width in titles.items())}{'ratio':>7}"]
    for name, figures in rounds.items():
        each = [one.completions_per_s for one in figures]
        cpu_ms = median(sum(one.cpu_ms.values()) for one in figures)
        lines.append(
            f"{name:<16}{speeds[name]:14.3f}{min(each):9.3f}{max(each):9.3f}{cpu_ms:13.2f}"
            f"{median(one.mean_length for one in figures):8.1f}"
            f"{100 * median(one.constant_groups for one in figures):13.1f} %{speeds[name] / speeds[peer]:7.2f}"
        )
    return lines


def with_sizes(workload: Workload, arguments: argparse.Namespace) -> Workload:
    """Return the workload with the steps and prompts that are asked for. Raises: SystemExit if no step is counted."""
    sizes = {"steps": arguments.steps, "rollout_prompts": arguments.rollout_prompts}
    workload = replace(workload, **{name: size for name, size in sizes.items() if size is not None})
    if workload.steps < (least := workload.warm_up + workload.rest + 1):
        raise SystemExit(f"--steps {workload.steps}: {least - 1} are not counted, so that {least} is the least")
    return workload


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Completions per second of whole runs, against TRL's GRPOTrainer.")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["uniform", "geometric"])
    parser.add_argument("--model", type=Path, help="pretrained, for all workloads but those two")
    parser.add_argument("--problems", type=Path, default=PROBLEMS, help="arithmetic problems, rows with their answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rollout-prompts", type=int, help="our -ibs and -imbs; a multiple of the former")
    parser.add_argument("--steps", type=int, help="of a run")
    parser.add_argument("--trl-threads", type=int, nargs="+", default=[1, 2], help="each is a way to run TRL")
    parser.add_argument("--trl-env", type=Path, default=DIRECTORY, help="made if missing")
    parser.add_argument("--flags", help="of ours, besides; default: --inflight-update if there is one")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    chosen = [with_sizes(WORKLOADS[name], arguments) for name in arguments.workloads]
    flags = our_defaults() if arguments.flags is None else shlex.split(arguments.flags)
    trl_python = ensure_trl(arguments.trl_env.expanduser().absolute())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running run is ended first
    load_before = os.getloadavg()[0]
    all_rounds: dict[str, dict[str, list[Figures]]] = {}
    with TemporaryDirectory(prefix="end-to-end-") as scratch:
        bench = Bench(
            prompts_per_step=arguments.prompts_per_step,
            group_size=arguments.group_size,
            flags=tuple(flags),
            trl_python=trl_python,
            scratch=Path(scratch),
        )
        for workload in chosen:
            make_workload(
                workload,
                bench.scratch / workload.name,
                num_prompts=workload.steps * bench.prompts_per_step,
                model=arguments.model,
                problems=arguments.problems,
            )
            all_rounds[workload.name] = measure(bench, workload, arguments.rounds, arguments.trl_threads)
    print(f"\n{os.cpu_count()} cores, load {load_before:.1f} before; ours with {shlex.join(flags)}")
    for name, rounds in all_rounds.items():
        print("\n".join([f"\n{name}", *table(rounds)]))
    if arguments.json:
        sizes: dict[str, Any] = {"prompts_per_step": bench.prompts_per_step, "group_size": bench.group_size}
        sizes |= {"model": arguments.model and str(arguments.model), "workloads": [asdict(each) for each in chosen]}
        written = {
            name: {way: [*map(asdict, runs)] for way, runs in rounds.items()} for name, rounds in all_rounds.items()
        }
        everything = {**sizes, "flags": flags, "trl": TRL_PINS, "load": load_before, "runs": written}
        arguments.json.write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
