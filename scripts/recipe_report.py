"""Report what a recipe on SmolLM2 reached: a table, a picture, and whether it is enough.

    python scripts/recipe_report.py sft_dpo|reward_model|tool_use ROOT

In: the folder of the recipe's files: scored greedy answers (`NAME-SEED.jsonl`), evaluations of its runs, `trl-JOB-SEED`
of scripts/bench/trl_recipes.py where that has run, and `stages/NAME.json` (the seconds of each stage). Out: the table
on the terminal, and ROOT/RECIPE.png. Exit code: 1, with the figure, if a mean over the seeds is not as good as claimed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")  # write files without opening a window
from matplotlib import pyplot
from run_rows import read_rows

Curve = Sequence[tuple[float, float]]  # optimizer step, value
Read = Callable[[Path], Sequence[float]]  # the folder of a recipe's files -> a value for each seed
ReadCurves = Callable[[Path], Sequence[Curve]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Hold what a page says of two figures: the mean of one is above that of another by so much."""

    better: str
    worse: str
    gain: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Hold what is read, drawn and claimed of a recipe."""

    accuracies: Mapping[
        str, Read
    ]  # of held-out greedy answers, by the name of the model; one that has none is left out
    claims: Sequence[Claim]
    curves: Mapping[str, ReadCurves]  # a line for each seed
    y_label: str  # of the curves
    others: Mapping[str, Read] = field(default_factory=dict)  # figures of the table alone


def answers(pattern: str) -> Read:
    """Read the share of correct answers of each file that matches."""

    def read(root: Path) -> list[float]:
        return [mean(row["answer_correct"] is True for row in read_rows(path)) for path in sorted(root.glob(pattern))]

    return read


def evaluated(pattern: str, *, key: str = "accuracy", place: int = -1) -> Read:
    """Read a figure of an evaluation of each run that matches, by default of its last one."""

    def read(root: Path) -> list[float]:
        return [rows[place][key] for rows in _rows(root, pattern, "eval/summary.jsonl") if rows]

    return read


def curve_of(pattern: str, file: str, key: str) -> ReadCurves:
    """Read a figure over the optimizer steps of each run that matches."""

    def read(root: Path) -> list[Curve]:
        return [[(row["step"], row[key]) for row in rows if key in row] for rows in _rows(root, pattern, file)]

    return read


def curve_of_trl(pattern: str, key: str) -> ReadCurves:
    """Read a figure of the log of each of TRL's trainers that matches."""

    def read(root: Path) -> list[Curve]:
        files = sorted(root.glob(f"{pattern}/trl.json"))
        logs = [json.loads(path.read_text(encoding="utf-8"))["log"] for path in files]
        return [[(row["step"], row[key]) for row in log if key in row] for log in logs]

    return read


def _rows(root: Path, pattern: str, file: str) -> Iterator[Sequence[Mapping[str, float]]]:
    yield from (read_rows(path) for path in sorted(root.glob(f"{pattern}/{file}")))


RECIPES = {
    "sft_dpo": Recipe(
        accuracies={
            "as it comes": answers("eval-start.jsonl"),
            "SFT": answers("eval-sft.jsonl"),
            "SFT, DPO": answers("eval-dpo-*.jsonl"),
            "SFT, DPO of TRL": answers("eval-trl-dpo-*.jsonl"),
        },
        claims=[
            Claim(better="SFT", worse="as it comes", gain=0.1),
            Claim(better="SFT, DPO", worse="SFT", gain=0.1),
        ],
        others={"held-out pairs in order": evaluated("dpo-[0-9]*", key="rewards/accuracies")},
        curves={
            "Coati-RL": curve_of("dpo-[0-9]*", "metrics.jsonl", "loss"),
            "TRL": curve_of_trl("trl-dpo-*", "loss"),
        },
        y_label="loss of DPO",
    ),
    "reward_model": Recipe(
        accuracies={
            "as it comes": evaluated("rl-[0-9]*", place=0),
            "RL": evaluated("rl-[0-9]*"),
            "RL of TRL": answers("eval-trl-rl-*.jsonl"),
        },
        claims=[Claim(better="RL", worse="as it comes", gain=0.3)],
        others={
            "after half the steps of RL": evaluated("rl-[0-9]*", place=1),
            "and of TRL": answers("half-trl-rl-*.jsonl"),
            "held-out pairs in order": evaluated("reward-model-[0-9]*", key="rewards/accuracies"),
        },
        curves={
            "Coati-RL": curve_of("rl-[0-9]*", "metrics.jsonl", "reward_mean"),
            "TRL": curve_of_trl("trl-rl-*", "reward"),
        },
        y_label="mean of the reward model's scores",
    ),
    "tool_use": Recipe(
        accuracies={
            "SFT": evaluated("rl-[0-9]*", place=0),
            "SFT, RL": evaluated("rl-[0-9]*"),
            "the same\nwithout the tool": answers("without-tool-*.jsonl"),
            "SFT, RL of TRL": evaluated("eval-trl-tools-[0-9]*", place=0),
        },
        claims=[
            Claim(better="SFT, RL", worse="SFT", gain=0.5),
            Claim(better="SFT, RL", worse="the same\nwithout the tool", gain=0.5),
        ],
        others={
            "after half the steps of RL": evaluated("rl-[0-9]*", place=1),
            "and of TRL": evaluated("half-trl-tools-[0-9]*", place=0),
        },
        curves={
            "Coati-RL": curve_of("rl-[0-9]*", "metrics.jsonl", "reward_mean"),
            "TRL": curve_of_trl("trl-tools-*", "reward"),
        },
        y_label="mean reward of the rollouts",
    ),
}


def shortfalls(accuracies: Mapping[str, Sequence[float]], claims: Sequence[Claim]) -> Iterator[str]:
    """Yield one sentence with the figures for each claim that does not hold."""
    for claim in claims:
        better, worse = mean(accuracies[claim.better]), mean(accuracies[claim.worse])
        if better - worse < claim.gain:
            of_both = f"{claim.better!r} has {better:.1%} and {claim.worse!r} {worse:.1%}"
            yield f"{of_both}: less than {100 * claim.gain:.0f} points"


def table(figures: Mapping[str, Sequence[float]], seconds: Mapping[str, int]) -> Iterator[str]:
    """Yield the lines of the report: figures by seed, then what each stage took."""
    for name, values in figures.items():
        yield f"{' '.join(name.split())}: {', '.join(f'{value:.1%}' for value in values)}"
    yield from (f"{name}: {taken} s" for name, taken in seconds.items())
    yield f"all stages: {sum(seconds.values()) / 60:.1f} min"


def draw(recipe: Recipe, accuracies: Mapping[str, Sequence[float]], root: Path, output: Path) -> None:
    """Write the picture: the accuracy of each model, a point for each seed, and the curves over the steps."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    bars = left.bar([*accuracies], [mean(values) for values in accuracies.values()], color="lightsteelblue")
    left.bar_label(bars, fmt="{:.1%}", padding=6)
    for place, values in enumerate(accuracies.values()):
        left.plot([place] * len(values), values, "k.")
    left.set(ylim=(0, 1.08), ylabel="held-out greedy accuracy", title="a point is a seed")
    left.tick_params(axis="x", labelsize=8)
    for number, (name, read) in enumerate(recipe.curves.items()):
        for index, curve in enumerate(read(root)):
            label = name if index == 0 else None
            right.plot(*zip(*curve, strict=True), color=f"C{number}", alpha=0.8, linewidth=1.2, label=label)
    right.set(xlabel="optimizer step", ylabel=recipe.y_label, title="a line is a seed")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Report on a recipe and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("root", type=Path, help="folder of the recipe's files")
    given = parser.parse_args()
    root, recipe = given.root, RECIPES[given.recipe]
    accuracies = {name: values for name, read in recipe.accuracies.items() if (values := read(root))}
    others = {name: values for name, read in recipe.others.items() if (values := read(root))}
    stages = sorted((root / "stages").glob("*.json"), key=lambda path: path.stat().st_mtime)
    seconds = {path.stem: json.loads(path.read_text(encoding="utf-8"))["seconds"] for path in stages}
    draw(recipe, accuracies, root, root / f"{given.recipe}.png")
    print("\n".join([*table({**accuracies, **others}, seconds), str(root / f"{given.recipe}.png")]))
    failures = list(shortfalls(accuracies, recipe.claims))
    for failure in failures:
        print(f"not reached: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
