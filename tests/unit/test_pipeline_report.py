"""Test the report of the pipeline example: figures from its files, and which of them are not enough."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pipeline_report
import pytest
from pipeline_report import MODELS, Results, draw, read_results, shortfalls, table

GOOD = Results(
    accuracy={
        "sft": 0.3,
        "rl-reward-model": 0.7,
        "rl-verifiable": 0.95,
        "student-sft": 0.3,
        "student-distilled": 0.4,
    },
    pair_accuracy=0.8,
    curves={"rl-reward-model": [(0, 0.3), (10, 0.7)], "rl-verifiable": [(0, 0.7), (20, 0.95)]},
)


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a pipeline that has reached the figures of GOOD, each over 20 prompts."""
    for name, accuracy in GOOD.accuracy.items():
        answers = [{"answer_correct": index < round(20 * accuracy)} for index in range(20)]
        write_rows(tmp_path / f"eval-{name}.jsonl", answers)
    for name, curve in GOOD.curves.items():
        rows = [{"step": step, "task": "arithmetic", "accuracy": value} for step, value in curve]
        write_rows(tmp_path / name / "eval" / "summary.jsonl", rows)
    pairs = [{"step": step, "task": "eval", "rewards/accuracies": value} for step, value in ((0, 0.5), (9, 0.8))]
    write_rows(tmp_path / "reward-model" / "eval" / "summary.jsonl", pairs)
    write_rows(tmp_path / "stages" / "sft.json", [{"seconds": 70}])
    write_rows(tmp_path / "stages" / "teacher.jsonl.json", [{"seconds": 20}])
    return tmp_path


def test_figures_are_read_from_the_evaluations_of_the_stages(root: Path) -> None:
    assert read_results(root) == GOOD


def test_what_was_claimed_is_reached_at_the_bounds() -> None:
    assert list(shortfalls(GOOD)) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rl-reward-model": 0.3}, "RL, reward model has 30.0% .*, not more than SFT with 30.0%"),
        ({"rl-verifiable": 0.7}, "RL, verifiable reward has 70.0% .*, not more than RL, reward model with 70.0%"),
        ({"student-distilled": 0.39}, "the distilled student is 9.0 points over the one of SFT only, below 10"),
    ],
)
def test_an_accuracy_that_is_not_enough_is_named_with_its_figures(changed: dict[str, float], message: str) -> None:
    (found,) = shortfalls(replace(GOOD, accuracy={**GOOD.accuracy, **changed}))
    assert re.fullmatch(message, found)


def test_a_reward_model_that_orders_too_few_pairs_is_named_with_its_figure() -> None:
    (found,) = shortfalls(replace(GOOD, pair_accuracy=0.79))
    assert found == "the reward model orders 79.0% of the held-out pairs, below 80%"


def test_the_table_has_every_model_and_the_sum_of_the_seconds() -> None:
    lines = list(table(GOOD, {"sft": {"seconds": 70}, "teacher.jsonl": {"seconds": 20}}))
    assert [line for line in lines if "accuracy" in line] == [
        f"held-out greedy accuracy, {MODELS[name]}: {value:.1%}" for name, value in GOOD.accuracy.items()
    ]
    assert lines[-3:] == ["sft: 70 s", "teacher.jsonl: 20 s", "all stages: 1.5 min"]


def test_the_picture_shows_the_stages_of_reinforcement_learning_one_after_another(tmp_path: Path) -> None:
    draw(GOOD, tmp_path / "pipeline.png")
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_the_command_ends_with_1_and_the_figure_if_one_is_not_enough(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline_report.py", str(root)])
    assert pipeline_report.main() == 0
    assert "all stages: 1.5 min" in capsys.readouterr().out
    write_rows(root / "eval-rl-verifiable.jsonl", [{"answer_correct": False}, {"answer_correct": True}])
    assert pipeline_report.main() == 1
    assert "not reached: RL, verifiable reward has 50.0% of the held-out prompts right" in capsys.readouterr().err


def test_a_stage_that_has_not_run_is_named(root: Path) -> None:
    (root / "eval-student-sft.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"eval-student-sft\.jsonl: cannot be read"):
        read_results(root)
