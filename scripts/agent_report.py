"""Report what an agent's example reached: a table, a picture, one episode, and whether it is enough.

    python scripts/agent_report.py runs/agent_quickstart
    python scripts/agent_report.py runs/textarena

In: the run directory `rl` with its metrics, rollouts and evaluations, `without-tool.jsonl` (of the calculator: greedy
answers of the trained model without the tool, scored), and `stages/NAME.json` (the seconds that each stage took).
Out: the table on the terminal, `learning.png` and `episode.md`. Exit code: 1, with the figure, if the model has not
learned what `shortfalls` asks for.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")  # write files without opening a window
from episode_table import episode_table
from matplotlib import pyplot
from run_rows import Row, read_rows
from transformers import AutoTokenizer

MAX_BEFORE, MIN_AFTER = 0.4, 0.9  # held-out greedy accuracy with the calculator
MIN_LOSS_WITHOUT_TOOL = 0.5  # of the accuracy, when the trained model has no calculator
MIN_GAIN = 0.2  # mean reward of the held-out games
Curve = Sequence[tuple[int, float]]  # optimizer step, value


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Hold the figures of an example."""

    rewards: Curve  # mean of the step's rollouts, sampled at temperature 1
    turns: Curve  # answers of an episode, mean of the step's rollouts
    calls: Curve  # share of the step's episodes with a call of a tool
    held_out: Curve  # mean reward of the evaluations: greedy accuracy, or that of games at temperature 1
    without_tool: float | None  # greedy accuracy of the trained model without the tool; None: a game

    @property
    def before(self) -> float:
        """Return the held-out figure before the first step of RL."""
        return self.held_out[0][1]

    @property
    def after(self) -> float:
        """Return the held-out figure after the last step."""
        return self.held_out[-1][1]


def read_results(root: Path) -> Results:
    """Read the files of all stages. Raises: SystemExit with a message if one is missing."""
    metrics = read_rows(root / "rl" / "metrics.jsonl")
    calls: dict[int, list[bool]] = defaultdict(list)
    for row in read_rollouts(root):
        calls[row["step"]].append(has_call(row))
    evaluations = sorted((root / "rl" / "eval").glob("*-step-*.jsonl"))
    without = root / "without-tool.jsonl"
    return Results(
        rewards=[(row["step"], row["reward_mean"]) for row in metrics],
        turns=[(row["step"], row["turns_mean"]) for row in metrics],
        calls=[(step, fmean(found)) for step, found in sorted(calls.items())],
        held_out=[(int(path.stem.rpartition("-")[2]), mean_reward(read_rows(path))) for path in evaluations],
        without_tool=mean_reward(read_rows(without)) if without.exists() else None,
    )


def read_rollouts(root: Path) -> Iterator[Row]:
    """Yield the last trajectory of each episode, in the order of the steps."""
    for path in sorted((root / "rl" / "rollouts").glob("steps-*.jsonl")):
        yield from (row for row in read_rows(path) if "environment" in row)


def has_call(row: Row) -> bool:
    """Return True if a tool was called in an episode."""
    return any((turn.get("info") or {}).get("tools") for turn in row["environment"]["turns"])


def mean_reward(rows: Sequence[Row]) -> float:
    """Return the mean reward of answers; one without a verdict counts as 0."""
    return fmean(row["reward"] or 0.0 for row in rows)


def shortfalls(results: Results) -> Iterator[str]:
    """Yield one sentence with the figures for each claim that the results do not support."""
    before, after, without = results.before, results.after, results.without_tool
    if without is None:
        if after - before < MIN_GAIN:
            yield f"the mean reward of held-out games went from {before:.2f} to {after:.2f}, less than {MIN_GAIN} up"
        return
    if before > MAX_BEFORE:
        yield f"{before:.1%} of the held-out products are right before RL, more than {MAX_BEFORE:.0%}"
    if after < MIN_AFTER:
        yield f"{after:.1%} of the held-out products are right after RL, less than {MIN_AFTER:.0%}"
    if after - without < MIN_LOSS_WITHOUT_TOOL:
        yield (
            f"{without:.1%} of the held-out products are right without the tool, "
            f"which is not clearly less than {after:.1%}"
        )


def table(results: Results, timings: Mapping[str, Row]) -> Iterator[str]:
    """Yield the lines of the report: figures, then what each stage took."""
    if results.without_tool is None:
        yield f"mean reward of held-out games: {results.before:.3f} before RL, {results.after:.3f} after"
        first, last = results.turns[0][1], results.turns[-1][1]
        yield f"guesses of a game in training: {first:.1f} in the first step, {last:.1f} in the last"
    else:
        yield f"held-out greedy accuracy before RL: {results.before:.1%}"
        yield f"held-out greedy accuracy after RL: {results.after:.1%}"
        yield f"held-out greedy accuracy after RL, without the tool: {results.without_tool:.1%}"
        first, last = results.calls[0][1], results.calls[-1][1]
        yield f"episodes with a call in training: {first:.1%} in the first step, {last:.1%} in the last"
    yield from (f"{name}: {row['seconds']} s" for name, row in timings.items())
    yield f"all stages: {sum(row['seconds'] for row in timings.values()) / 60:.1f} min"


def draw(results: Results, output: Path) -> None:
    """Write the picture: the curves over the steps of RL, and the held-out figures as bars."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained", width_ratios=(3, 2))
    is_game = results.without_tool is None
    name = "mean reward" if is_game else "greedy accuracy"
    left.plot(*zip(*results.rewards, strict=True), color="tab:blue", alpha=0.8, label="reward of the rollouts")
    if not is_game:
        left.plot(*zip(*results.calls, strict=True), color="tab:orange", label="share of the rollouts with a call")
    left.plot(*zip(*results.held_out, strict=True), color="tab:green", marker="o", label=f"{name}, held out")
    left.set(xlabel="optimizer step of RL", ylim=(0, 1.05), title="reinforcement learning")
    left.grid(alpha=0.3)
    left.legend(loc="lower right")
    values = {"before RL": results.before, "after RL": results.after}
    if results.without_tool is not None:
        values["after RL,\nwithout the tool"] = results.without_tool
    bars = right.bar(list(values), list(values.values()), color=["tab:gray", "tab:green", "tab:orange"][: len(values)])
    right.bar_label(bars, fmt="{:.2f}" if is_game else "{:.1%}")
    right.set(ylim=(0, 1.1), title=f"{name}, held out")
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def last_episode(root: Path) -> Row:
    """Return an episode of the last step with the highest reward; of these, one with the most turns."""
    rows = list(read_rollouts(root))
    of_step = [row for row in rows if row["step"] == rows[-1]["step"] and row["reward"] is not None]
    return max(of_step, key=lambda row: (row["reward"], len(row["turns"])))


def main() -> int:
    """Report on a run and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", type=Path, help="folder of the example's files")
    root: Path = parser.parse_args().root
    results = read_results(root)
    stages = sorted((root / "stages").glob("*.json"), key=lambda path: path.stat().st_mtime)
    timings = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in stages}
    draw(results, root / "learning.png")
    episode = episode_table(last_episode(root), AutoTokenizer.from_pretrained(root / "base"))
    (root / "episode.md").write_text(episode, encoding="utf-8")
    print("\n".join(table(results, timings)))
    print(f"{root / 'learning.png'}\n{root / 'episode.md'}:\n{episode}", end="")
    failures = list(shortfalls(results))
    for failure in failures:
        print(f"not reached: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
