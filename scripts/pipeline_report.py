"""Report what `scripts/pipeline_example.sh` reached: a table, a picture, and whether it is enough.

    python scripts/pipeline_report.py runs/pipeline

In: `eval-MODEL.jsonl` (greedy samples of the held-out prompts, scored), the run directories of the reward model and of
both RL stages, and `stages/NAME.json` (the seconds that each stage took). Out: the table on the terminal, and
`pipeline.png`. Exit code: 1, with the figure, if a model is not as good as `shortfalls` asks for.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # write files without opening a window
from matplotlib import pyplot
from run_rows import Row, accuracy_by_task, read_rows

# Stage -> what the table and the picture call its model.
MODELS = {
    "sft": "SFT",
    "rl-reward-model": "RL, reward model",
    "rl-verifiable": "RL, verifiable reward",
    "student-sft": "student, SFT only",
    "student-distilled": "student, distilled",
}
MIN_PAIR_ACCURACY = 0.8  # share of held-out pairs that the reward model orders right
MIN_DISTILLATION_GAIN = 0.1  # of the greedy accuracy, over the student that saw the SFT data alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Hold the figures of a run of the pipeline."""

    accuracy: Mapping[str, float]  # greedy accuracy on the held-out prompts, by stage of MODELS
    pair_accuracy: float  # of the reward model on the held-out pairs
    curves: Mapping[str, Sequence[tuple[int, float]]]  # RL stage -> (optimizer step, greedy accuracy)


def read_results(root: Path) -> Results:
    """Read the evaluations of all stages. Raises: SystemExit with a message if a file is missing."""
    rl_stages = [name for name in MODELS if name.startswith("rl-")]
    return Results(
        accuracy={name: share_correct(read_rows(root / f"eval-{name}.jsonl")) for name in MODELS},
        pair_accuracy=read_rows(root / "reward-model" / "eval" / "summary.jsonl")[-1]["rewards/accuracies"],
        curves={name: next(iter(accuracy_by_task(_summary(root, name)).values())) for name in rl_stages},
    )


def _summary(root: Path, stage: str) -> list[Row]:
    return read_rows(root / stage / "eval" / "summary.jsonl")


def share_correct(rows: Sequence[Row]) -> float:
    """Return the share of scored samples whose answer is correct."""
    return sum(row["answer_correct"] is True for row in rows) / len(rows)


def shortfalls(results: Results) -> Iterator[str]:
    """Yield one sentence with the figures for each claim of docs/pipeline.md that the results do not support."""
    accuracy = results.accuracy
    for worse, better in (("sft", "rl-reward-model"), ("rl-reward-model", "rl-verifiable")):
        if accuracy[better] <= accuracy[worse]:
            yield (
                f"{MODELS[better]} has {accuracy[better]:.1%} of the held-out prompts right, "
                f"not more than {MODELS[worse]} with {accuracy[worse]:.1%}"
            )
    if results.pair_accuracy < MIN_PAIR_ACCURACY:
        share, limit = f"{results.pair_accuracy:.1%}", f"{MIN_PAIR_ACCURACY:.0%}"
        yield f"the reward model orders {share} of the held-out pairs, below {limit}"
    gain = accuracy["student-distilled"] - accuracy["student-sft"]
    if gain < MIN_DISTILLATION_GAIN:
        yield (
            f"the distilled student is {100 * gain:.1f} points over the one of SFT only, "
            f"below {100 * MIN_DISTILLATION_GAIN:.0f}"
        )


def table(results: Results, timings: Mapping[str, Row]) -> Iterator[str]:
    """Yield the lines of the report: figures, then what each stage took."""
    yield f"reward model: {results.pair_accuracy:.1%} of the held-out pairs in the right order"
    yield from (f"held-out greedy accuracy, {MODELS[name]}: {value:.1%}" for name, value in results.accuracy.items())
    yield from (f"{name}: {row['seconds']} s" for name, row in timings.items())
    yield f"all stages: {sum(row['seconds'] for row in timings.values()) / 60:.1f} min"


def draw(results: Results, output: Path) -> None:
    """Write the picture: both RL stages over their steps, and the greedy accuracy of every model."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained", width_ratios=(3, 4))
    start = 0
    for name, curve in results.curves.items():
        steps, values = zip(*curve, strict=True)
        left.plot([start + step for step in steps], values, marker="o", label=MODELS[name])
        start += steps[-1]
    left.set(
        xlabel="optimizer step of RL", ylabel="held-out greedy accuracy", ylim=(0, 1), title="reinforcement learning"
    )
    left.grid(alpha=0.3)
    left.legend(loc="lower right")
    labels = [MODELS[name].replace(", ", ",\n") for name in results.accuracy]
    colors = ["tab:gray", "tab:blue", "tab:orange", "tab:gray", "tab:green"]
    bars = right.bar(labels, list(results.accuracy.values()), color=colors)
    right.bar_label(bars, fmt="{:.1%}")
    right.set(ylim=(0, 1.05), title="all models")
    right.tick_params(axis="x", labelsize=8)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Report on a run and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", type=Path, help="folder of the pipeline's files")
    root: Path = parser.parse_args().root
    results = read_results(root)
    stages = sorted((root / "stages").glob("*.json"), key=lambda path: path.stat().st_mtime)
    timings = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in stages}
    draw(results, root / "pipeline.png")
    print("\n".join(f"[pipeline] {line}" for line in table(results, timings)))
    print(f"[pipeline] {root / 'pipeline.png'}")
    failures = list(shortfalls(results))
    for failure in failures:
        print(f"[pipeline] not reached: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
