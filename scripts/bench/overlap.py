"""Measure how well generation and training overlap: step times of real runs, in lockstep and one rollout step ahead.

    python scripts/bench/overlap.py [--rounds 5] [--steps 8] [--prompts 20] [--flags "-kl 0.01"] [--ways ...]
        [--json FILE]

There are one producer and one trainer, each on its own core, and the model of `length_model.py`, whose responses all
have --max-new-tokens tokens, so that steps are equal. In lockstep (`-nb 0`) both take turns: the time of generation and
rewards is the trainer's waiting time (Tgen), and the time of training is what it reports (Ttrain). One step ahead
(`-nb 1`, with and without `--inflight-update`) both run concurrently: overlap = max(Tgen, Ttrain) / step, 1 being
perfect. The flags are chosen so that Tgen and Ttrain are similar (hence the reference model of -kl); otherwise there is
little to gain.

Each round runs every variant once. The first two and the last two steps are not counted; medians over rounds.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from timed_process import finish, running

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WARM_UP, REST = 2, 2  # steps at the ends that are not counted
WAYS = {
    "lockstep": ["-nb", "0"],
    "one step ahead": ["-nb", "1"],
    "one step ahead, in flight": ["-nb", "1", "--inflight-update"],
}


def run_once(flags: list[str], scratch: Path, *, steps: int) -> dict[str, float]:
    """Return medians over the counted steps, in seconds: step, waiting for rollouts, training, weight sync."""
    with TemporaryDirectory(dir=scratch) as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, str(ROOT / "rl_example.py"), *flags, "--run-dir", str(run_dir)]
        with running(command, num_threads=1, log=Path(directory) / "log") as process:
            finish(process)
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    if len(records) != steps:
        raise SystemExit(f"{len(records)} of {steps} steps were taken")
    counted = records[WARM_UP : steps - REST]
    times = [record["time_s"] for record in records[WARM_UP - 1 : steps - REST]]
    return {
        "step_s": median(after - before for before, after in pairwise(times)),
        "wait_s": median(record["rollout_wait_s"] for record in counted),
        "train_s": median(record["train_s"] for record in counted),
        "sync_s": median(record["sync_s"] for record in counted),
    }


def flags_of(arguments: argparse.Namespace, model: Path) -> list[str]:
    """Return the flags that all variants share."""
    prompts = str(arguments.prompts)
    options = {
        **{"-m": str(model), "-d": str(model / "prompts.jsonl"), "-rt": "boxed", "-s": "", "--device": "cpu"},
        **{"-t": "1", "-i": "1", "-ibs": prompts, "-imbs": prompts, "-tbs": prompts, "-tMbs": prompts},
        **{"-g": str(arguments.group_size), "-tmbs": str(8 * arguments.group_size), "-mpt": "64"},
        **{"-mnt": str(arguments.max_new_tokens), "--max-steps": str(arguments.steps), "-lr": "1e-9"},
        **{"-si": "-1", "--master_port": "0"},
    }
    return [*(part for option in options.items() for part in option), *shlex.split(arguments.flags)]


def main() -> None:
    """Measure, print the results and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="with lockstep among them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--prompts", type=int, default=20, help="per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--flags", default="-kl 0.01", help="more flags of rl_example.py")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    ways = {name: WAYS[name] for name in WAYS if name in {"lockstep", *arguments.ways}}
    rounds: list[dict[str, dict[str, float]]] = []
    with TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        num_prompts = str(arguments.prompts * arguments.steps)
        make = [sys.executable, str(HERE / "length_model.py"), str(model), "--lengths", "uniform"]
        subprocess.run([*make, "--num-prompts", num_prompts], check=True, stdout=subprocess.DEVNULL)
        shared = flags_of(arguments, model)
        for number in range(arguments.rounds):
            rounds.append(
                {name: run_once([*shared, *w], Path(directory), steps=arguments.steps) for name, w in ways.items()}
            )
            steps = ", ".join(f"{name} {figures['step_s']:.2f} s" for name, figures in rounds[-1].items())
            sys.stderr.write(f"round {number + 1} of {arguments.rounds}: {steps}\n")
    lockstep = [figures["lockstep"] for figures in rounds]
    longest = [max(figures["wait_s"], figures["train_s"]) for figures in lockstep]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians over {arguments.rounds} rounds")
    print(f"{'':<28}{'step':>8}{'wait':>8}{'train':>8}{'sync':>8}{'overlap':>10}{'to lockstep':>13}")
    summary = {}
    for name in ways:
        figures = {key: median(r[name][key] for r in rounds) for key in lockstep[0]}
        figures["overlap"] = median(t / r[name]["step_s"] for t, r in zip(longest, rounds, strict=True))
        figures["speedup"] = median(r["lockstep"]["step_s"] / r[name]["step_s"] for r in rounds)
        summary[name] = figures
        seconds = "".join(f"{figures[key]:7.2f}s" for key in ("step_s", "wait_s", "train_s", "sync_s"))
        print(f"{name:<28}{seconds}{figures['overlap']:10.2f}{figures['speedup']:12.2f}x")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rounds": rounds, "medians": summary}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
