"""Report what `scripts/real_model.sh` reached: held-out scores, a picture, and whether it is enough.

    python scripts/real_model_report.py RUN_DIR

In: a run's metrics.jsonl and eval/. A held-out prompt scores 1 if the greedy answer meets all of its constraints. Out:
a Markdown table of the scores by kind of constraint, and RUN_DIR/instruction_following.png. Exit code: 1, with the
figures, if the last evaluation is not MIN_GAIN above the first one.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # write files without opening a window
from instruction_task import KINDS
from matplotlib import pyplot
from run_rows import Row, read_rows

MIN_GAIN = 0.3  # of the held-out score


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Hold the figures of a run."""

    curve: Sequence[tuple[int, float]]  # (optimizer step, held-out score), from step 0 on
    rollouts: Sequence[tuple[int, float]]  # (optimizer step, share of the sampled answers that meet all constraints)
    before: Mapping[str, float]  # kind of constraint -> held-out score of the prompts that have it
    after: Mapping[str, float]
    num_prompts: int

    @property
    def gain(self) -> float:
        """Return the last held-out score less the first one."""
        return self.curve[-1][1] - self.curve[0][1]


def read_results(run_dir: Path) -> Results:
    """Read a run's figures. Raises: SystemExit with a message if a file is missing or holds a single evaluation."""
    summary = read_rows(run_dir / "eval" / "summary.jsonl")
    if len(summary) < 2:
        raise SystemExit(f"{run_dir}: evaluated {len(summary)} times; two are needed, before and after training")
    first, last = summary[0], summary[-1]
    answers = [read_rows(run_dir / "eval" / f"{row['task']}-step-{row['step']:06d}.jsonl") for row in (first, last)]
    metrics = read_rows(run_dir / "metrics.jsonl")
    return Results(
        curve=[(row["step"], row["accuracy"]) for row in summary],
        rollouts=[(row["step"], row["answer_accuracy"]) for row in metrics if row["answer_accuracy"] is not None],
        before=score_by_kind(answers[0]),
        after=score_by_kind(answers[1]),
        num_prompts=last["num_prompts"],
    )


def score_by_kind(answers: Sequence[Row]) -> dict[str, float]:
    """Return the share of correct answers among the prompts with each kind, in the order of KINDS."""
    correct: dict[str, list[bool]] = defaultdict(list)
    for row in answers:
        for constraint in json.loads(row["gt_answer"])["constraints"]:
            correct[constraint["kind"]].append(row["answer_correct"] is True)
    return {kind: sum(correct[kind]) / len(correct[kind]) for kind in KINDS if correct[kind]}


def table(results: Results) -> Iterator[str]:
    """Yield the lines of a Markdown table: the score of all prompts, then by kind."""
    yield "| prompts with | before | after |"
    yield "|---|---|---|"
    yield f"| all ({results.num_prompts}) | {results.curve[0][1]:.1%} | {results.curve[-1][1]:.1%} |"
    for kind, before in results.before.items():
        yield f"| {kind} | {before:.1%} | {results.after[kind]:.1%} |"


def draw(results: Results, output: Path) -> None:
    """Write the picture: scores over the steps, and by kind before and after."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained", width_ratios=(3, 4))
    left.plot(*zip(*results.rollouts, strict=True), linewidth=1, alpha=0.8, label="sampled answers, training prompts")
    left.plot(*zip(*results.curve, strict=True), marker="o", linewidth=2, label="greedy answers, held-out prompts")
    left.set(xlabel="optimizer step", ylabel="all constraints met", ylim=(0, 1), title="during training")
    left.grid(alpha=0.3)
    left.legend(loc="upper left", fontsize=8)
    places = range(len(results.before))
    for offset, name, scores in ((0.2, "before", results.before), (-0.2, "after", results.after)):
        bars = right.barh([place + offset for place in places], list(scores.values()), height=0.4, label=name)
        right.bar_label(bars, fmt="{:.0%}", fontsize=7, padding=2)
    right.set(xlim=(0, 1.1), title="held-out prompts, by kind of constraint")
    right.set_yticks(places, [kind.replace("_", " ") for kind in results.before])
    right.invert_yaxis()
    right.legend(loc="lower right", fontsize=8)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Report on a run and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    run_dir: Path = parser.parse_args().run_dir
    results = read_results(run_dir)
    draw(results, run_dir / "instruction_following.png")
    print("\n".join([*table(results), str(run_dir / "instruction_following.png")]))
    if results.gain < MIN_GAIN:
        (_, first), (step, last) = results.curve[0], results.curve[-1]
        print(
            f"not reached: held-out score {first:.1%} before, {last:.1%} at step {step}: "
            f"{100 * results.gain:.1f} points, below {100 * MIN_GAIN:.0f}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
