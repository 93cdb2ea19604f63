"""Train the quickstart's tiny model with every preset of --algo, and compare the results.

    python scripts/compare_algorithms.py MODEL_DIR OUT_DIR [--presets GRPO GSPO] [--steps 60] [--seeds 0] [-- FLAGS]

In: a model of make_tiny_model.py with its train.jsonl and eval.jsonl. Out: OUT_DIR/<preset>-<seed>/ (each an ordinary
run), OUT_DIR/comparison.md, comparison.json and comparison.png (reward over steps). Every run has the same prompts per
step, steps, seeds and lengths; there are K = 2 optimizer steps per weight sync, so that clipping has an effect in every
second one. Only the learning rate may differ. A complete run is not repeated. FLAGS are added to every run.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from run_rows import read_rows

from coati_rl.config.presets import PRESETS

matplotlib.use("Agg")  # write files without opening a window
from matplotlib import pyplot

LEARNING_RATES = dict.fromkeys(PRESETS, 3e-4)  # one for each preset; currently the same for all
WINDOW = 20  # first and last steps whose mean rewards are compared
TIMEOUT_S = 1800.0  # of one run
COMMON_FLAGS = {
    "--reward-type": "boxed",
    "--backend": "vllm",
    "--num-trainers": 1,
    "--num-inferencer": 1,
    "--num-generations": 8,
    "--inference-batch-size": 64,  # prompts between two weight syncs: those of two optimizer steps
    "--inference-microbatch-size": 64,
    "--train-batch-size": 32,
    "--train-minibatch-size": 32,
    "--train-microbatch-size": 16,
    "--max-new-tokens": 32,
    "--max-prompt-tokens": 512,
    "--save-interval": -1,
}

Row = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model_dir", type=Path, help="made by scripts/make_tiny_model.py")
    parser.add_argument("out_dir", type=Path, help="folder for runs, table and picture")
    parser.add_argument("--presets", nargs="+", default=[*PRESETS], choices=[*PRESETS], help="default: all")
    parser.add_argument("--steps", type=int, default=60, help=f"optimizer steps of each run, at least {2 * WINDOW}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each")
    own, flags = sys.argv[1:], []
    if "--" in own:  # argparse handles "--" only without options before it
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    arguments = parser.parse_args(own)
    arguments.flags = flags
    if arguments.steps < 2 * WINDOW:
        parser.error(
            f"--steps {arguments.steps}: the first and the last {WINDOW} steps are compared; use at least {2 * WINDOW}"
        )
    return arguments


def train(preset: str, seed: int, arguments: argparse.Namespace) -> list[Row]:
    """Return the metrics of one run, which is started if it does not exist."""
    run_dir = arguments.out_dir / f"{preset.lower()}-{seed}"
    metrics = run_dir / "metrics.jsonl"
    rows = read_rows(metrics) if metrics.is_file() else []
    if len(rows) == arguments.steps:
        return rows
    if run_dir.exists():
        raise SystemExit(f"{run_dir}: holds {len(rows)} of {arguments.steps} steps; remove it to run it again")
    flags = {
        **COMMON_FLAGS,
        "--model": arguments.model_dir,
        "--dataset": arguments.model_dir / "train.jsonl",
        "--algo": preset,
        "--learning-rate": LEARNING_RATES[preset],
        "--seed": seed,
        "--max-steps": arguments.steps,
        "--run-dir": run_dir,
    }
    command = [sys.executable, "rl_example.py", *(word for pair in flags.items() for word in pair), *arguments.flags]
    print(f"{preset}, seed {seed}: {run_dir}", flush=True)
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([*map(str, command)], cwd=root, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{preset}, seed {seed}: the run failed with exit code {done.returncode}; see {run_dir}")
    return read_rows(metrics)


def mean_of(rows: list[Row], key: str) -> float | None:
    """Return the mean of a metric over the steps that have it; None if there are none."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return fmean(values) if values else None


def summarise(preset: str, runs: list[list[Row]]) -> Row:
    """Return one row of the table: means over steps, then over seeds."""
    steps = [row for rows in runs for row in rows]
    rewards = [[row["reward_mean"] for row in rows] for rows in runs]
    first, last = ([fmean(curve[part]) for curve in rewards] for part in (slice(WINDOW), slice(-WINDOW, None)))
    return {
        "--algo": preset,
        "learning rate": LEARNING_RATES[preset],
        f"reward, first {WINDOW}": fmean(first),
        f"last {WINDOW}": fmean(last),
        "gain": fmean(last) - fmean(first),
        "least gain of a seed": min(end - begin for begin, end in zip(first, last, strict=True)),
        "clipped": mean_of(steps, "clip_fraction"),
        "KL, nats": mean_of(steps, "kl_mean"),
        "entropy at the end, nats": mean_of([row for rows in runs for row in rows[-WINDOW:]], "entropy_mean"),
        "groups rolled out": sum(row["groups_total"] for row in steps) // len(runs),
        "of these filtered": sum(row["groups_filtered"] for row in steps) // len(runs),
        "seconds": round(fmean(rows[-1]["time_s"] for rows in runs)),
    }


def table(summaries: list[Row]) -> str:
    """Format the summaries as a Markdown table."""
    names = [*summaries[0]]
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in summaries)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.0e}" if value else "0"
    return str(value)


def draw(results: dict[str, list[list[Row]]], output: Path) -> None:
    """Plot the mean reward over steps, smoothed over five steps, with a line for each preset."""
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for preset, runs in results.items():
        rewards = [fmean(rows[step]["reward_mean"] for rows in runs) for step in range(len(runs[0]))]
        smooth = [fmean(rewards[max(0, step - 4) : step + 1]) for step in range(len(rewards))]
        axes.plot(range(1, len(smooth) + 1), smooth, label=preset, linewidth=1.5)
    axes.set(xlabel="optimizer step", ylabel="mean reward (of the last five steps)", title="every preset of --algo")
    axes.grid(alpha=0.3)
    axes.legend(ncols=2)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Train, then write the table and the figure."""
    arguments = parse_arguments()
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    results = {preset: [train(preset, seed, arguments) for seed in arguments.seeds] for preset in arguments.presets}
    summaries = [summarise(preset, runs) for preset, runs in results.items()]
    (arguments.out_dir / "comparison.json").write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    (arguments.out_dir / "comparison.md").write_text(table(summaries), encoding="utf-8")
    draw(results, arguments.out_dir / "comparison.png")
    print(table(summaries))


if __name__ == "__main__":
    main()
