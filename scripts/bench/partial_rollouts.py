"""Measure how idle a producer is when response lengths have a long tail, with partial rollouts and without.

    python scripts/bench/partial_rollouts.py [--rounds 5] [--steps 16] [--prompts 16] [--in-flight 8] [-nb 3]
        [--ways ...] [--kill] [--flags ...] [--json FILE]

Whole runs with one producer and one trainer, each on its own core, and the model of `length_model.py`, whose response
lengths are geometric (mean 61, at most --max-new-tokens). Out, for each way: the share of time in which the producer
held no prompt (producer_idle_fraction of metrics.jsonl, by the time of each step), response tokens per second, seconds
per step, and the largest staleness of a token in weight syncs, beside its bound, -nb, which it must not exceed. With
--kill the producer is killed in the middle of each run, and only the steps before are counted; in any case each prompt
must have come in for one step only. There is no table if one of the two does not hold.

Each round runs every way once. The first two and the last two steps are not counted; medians over rounds.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from timed_process import finish, running, wait_for_step

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WARM_UP, REST = 2, 2  # steps at the ends that are not counted
WAYS = {"drained": [], "in flight": ["--inflight-update"], "partial rollouts": ["--partial-rollouts"]}


def run_once(flags: list[str], scratch: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of a run. Raises: SystemExit if a prompt was lost or came in twice, or a token is too old."""
    with TemporaryDirectory(dir=scratch) as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, str(ROOT / "rl_example.py"), *flags, "--run-dir", str(run_dir)]
        with running(command, num_threads=1, log=Path(directory) / "log") as process:
            if options.kill:
                wait_for_step(process, run_dir / "metrics.jsonl", options.steps // 2)
                _kill_producer(process.pid)
            finish(process)
        records = _read([run_dir / "metrics.jsonl"])
        samples = _read(sorted((run_dir / "rollouts").iterdir()))
    if len(records) != options.steps:
        raise SystemExit(f"{len(records)} of {options.steps} steps were taken")
    times_in = Counter(sample["uid"] for sample in samples if sample["sample"] == 0)
    if len(times_in) != options.steps * options.prompts or set(times_in.values()) != {1}:
        raise SystemExit(f"{len(times_in)} prompts came in for steps, at most {max(times_in.values())} times")
    stalest = max(record["staleness_max"] for record in records)
    if stalest > options.n_behind:
        raise SystemExit(f"a token is {stalest} syncs old, more than -nb {options.n_behind}")
    last = options.steps // 2 if options.kill else options.steps - REST
    counted = records[WARM_UP:last]
    seconds = counted[-1]["time_s"] - records[WARM_UP - 1]["time_s"]
    ends_s = [record["time_s"] for record in records[WARM_UP - 1 : last]]
    idle_s = sum(
        r["producer_idle_fraction"] * (end - begin) for r, (begin, end) in zip(counted, pairwise(ends_s), strict=True)
    )
    return {
        "idle": idle_s / seconds,
        "tokens_per_s": sum(record["num_response_tokens"] for record in counted) / seconds,
        "step_s": seconds / len(counted),
        "staleness": stalest,
    }


def _read(files: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.open(encoding="utf-8")]  # texts have other line ends


def _kill_producer(pid: int) -> None:
    """Kill the producer below this process."""
    for process in psutil.Process(pid).children(recursive=True):
        if " ".join(process.cmdline()).startswith("ray::ProducerActor"):
            process.kill()
            return
    raise RuntimeError("there is no producer to be killed")


def flags_of(options: argparse.Namespace, model: Path) -> list[str]:
    """Return the flags that all ways share."""
    prompts, group_size = str(options.prompts), options.group_size
    micro_batch = str(min(8, options.prompts) * group_size)
    values = {
        **{"-m": str(model), "-d": str(model / "prompts.jsonl"), "-rt": "boxed", "-s": "", "--device": "cpu"},
        **{"-t": "1", "-i": "1", "-ibs": prompts, "-imbs": str(options.in_flight), "-tbs": prompts, "-tMbs": prompts},
        **{
            "-g": str(group_size),
            "-tmbs": micro_batch,
            "-mpt": "64",
            "-nb": str(options.n_behind),
        },
        **{"-mnt": str(options.max_new_tokens), "--max-steps": str(options.steps), "-lr": "1e-9", "-kl": "0"},
        **{"-si": "-1", "--master_port": "0"},
    }
    return [*(part for value in values.items() for part in value), *shlex.split(options.flags)]


def main() -> None:
    """Measure, print the results and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    parser.add_argument("--prompts", type=int, default=16, help="per step")
    parser.add_argument("--in-flight", type=int, default=8, help="prompts; divides --prompts")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("-nb", "--n-behind", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=448)
    parser.add_argument("--kill", action="store_true", help="kill the producer in the middle of each run")
    parser.add_argument("--flags", default="", help="more flags of rl_example.py")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rounds: list[dict[str, dict[str, float]]] = []
    with TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make = [sys.executable, str(HERE / "length_model.py"), str(model), "--lengths", "geometric"]
        num_prompts = str(options.prompts * options.steps)
        subprocess.run([*make, "--num-prompts", num_prompts], check=True, stdout=subprocess.DEVNULL)
        shared = flags_of(options, model)
        for number in range(options.rounds):
            rounds.append({way: run_once([*shared, *WAYS[way]], Path(directory), options) for way in options.ways})
            sys.stderr.write(f"round {number + 1} of {options.rounds}: {rounds[-1]}\n")
    medians = {way: {key: median(each[way][key] for each in rounds) for key in rounds[0][way]} for way in options.ways}
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians over {options.rounds} rounds")
    print(f"{'':<20}{'idle':>8}{'tokens/s':>12}{'step':>10}{'staleness':>12}{'bound':>8}")
    for way, found in medians.items():
        print(
            f"{way:<20}{100 * found['idle']:>6.1f} %{found['tokens_per_s']:>12.0f}{found['step_s']:>8.2f} s"
            f"{found['staleness']:>12.0f}{options.n_behind:>8}"
        )
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
        figures = {"settings": settings, "cpus": os.cpu_count(), "load": os.getloadavg()[0], "medians": medians}
        options.json.write_text(json.dumps({**figures, "rounds": rounds}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
