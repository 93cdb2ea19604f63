"""Test the report of the agents' examples: figures from the files of a run, and which of them are not enough."""

import json
import random
import re
import sys
from dataclasses import replace
from math import log
from pathlib import Path

import agent_report
import make_agent_model
import multiplication_task
import pytest
from agent_report import Results, draw, has_call, last_episode, read_results, shortfalls, table
from episode_table import episode_parts, episode_table

CALCULATOR = Results(
    rewards=[(1, 0.25), (2, 0.75)],
    turns=[(1, 1.25), (2, 2.0)],
    calls=[(1, 0.25), (2, 1.0)],
    held_out=[(0, 0.4), (2, 0.9)],
    without_tool=0.4,
)
GAME = replace(CALCULATOR, calls=[(1, 0.0), (2, 0.0)], held_out=[(0, 0.5), (2, 0.75)], without_tool=None)


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def episode(step: int, *, is_called: bool, reward: float = 1.0, **fields: object) -> dict:
    answers = [{"role": "assistant", "info": {"tools": [{"name": "calculator"}]}}] if is_called else []
    turns = [*answers, {"role": "assistant", "info": {}}]
    return {"step": step, "reward": reward, "environment": {"turns": turns}, "turns": turns, **fields}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of an example that has reached the figures of CALCULATOR."""
    metrics = [{"step": 1, "reward_mean": 0.25, "turns_mean": 1.25}, {"step": 2, "reward_mean": 0.75, "turns_mean": 2}]
    write_rows(tmp_path / "rl" / "metrics.jsonl", metrics)
    tokens = {"prompt_token_ids": [1], "token_ids": [2, 3], "rollout_logprobs": [log(0.5), 0.0]}
    rollouts = [episode(1, is_called=index == 0, reward=float(index == 0)) for index in range(4)]
    rollouts += [episode(2, is_called=True, **tokens), {"step": 2}]  # the last line: a trajectory that was forked from
    write_rows(tmp_path / "rl" / "rollouts" / "steps-000001-000100.jsonl", rollouts)
    for step, num_right in ((0, 4), (2, 9)):
        answers = [{"reward": float(index < num_right)} for index in range(10)]
        write_rows(tmp_path / "rl" / "eval" / f"products-step-{step:06d}.jsonl", answers)
    write_rows(tmp_path / "without-tool.jsonl", [{"reward": 1.0}] * 4 + [{"reward": 0.0}] * 5 + [{"reward": None}])
    write_rows(tmp_path / "stages" / "sft.json", [{"seconds": 70}])
    write_rows(tmp_path / "stages" / "rl.json", [{"seconds": 20}])
    return tmp_path


def test_figures_are_read_from_the_files_of_the_stages(root: Path) -> None:
    assert read_results(root) == CALCULATOR


def test_a_game_has_no_evaluation_without_a_tool(root: Path) -> None:
    (root / "without-tool.jsonl").unlink()
    assert read_results(root) == replace(CALCULATOR, without_tool=None)


def test_what_was_claimed_is_reached_at_the_bounds() -> None:
    assert list(shortfalls(CALCULATOR)) == list(shortfalls(GAME)) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"held_out": [(0, 0.41), (2, 0.95)]}, "41.0% of the held-out products .* before RL, more than 40%"),
        ({"held_out": [(0, 0.4), (2, 0.89)], "without_tool": 0.1}, "89.0% of .* right after RL, less than 90%"),
        ({"without_tool": 0.41}, "41.0% of .* right without the tool, which is not clearly less than 90.0%"),
    ],
)
def test_an_accuracy_that_is_not_enough_is_named_with_its_figures(changed: dict, message: str) -> None:
    (found,) = shortfalls(replace(CALCULATOR, **changed))
    assert re.fullmatch(message, found)


def test_a_game_that_has_improved_too_little_is_named_with_its_figures() -> None:
    (found,) = shortfalls(replace(GAME, held_out=[(0, 0.5), (2, 0.69)]))
    assert found == "the mean reward of held-out games went from 0.50 to 0.69, less than 0.2 up"


def test_the_table_has_the_figures_and_the_sum_of_the_seconds() -> None:
    timings = {"sft": {"seconds": 70}, "rl": {"seconds": 20}}
    assert list(table(CALCULATOR, timings)) == [
        "held-out greedy accuracy before RL: 40.0%",
        "held-out greedy accuracy after RL: 90.0%",
        "held-out greedy accuracy after RL, without the tool: 40.0%",
        "episodes with a call in training: 25.0% in the first step, 100.0% in the last",
        "sft: 70 s",
        "rl: 20 s",
        "all stages: 1.5 min",
    ]
    assert list(table(GAME, {}))[:2] == [
        "mean reward of held-out games: 0.500 before RL, 0.750 after",
        "guesses of a game in training: 1.2 in the first step, 2.0 in the last",
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("results", [CALCULATOR, GAME])
def test_the_picture_is_written(tmp_path: Path, results: Results) -> None:
    draw(results, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")


def test_an_episode_without_a_call_has_none() -> None:
    assert has_call(episode(1, is_called=True))
    assert not has_call(episode(1, is_called=False))


def test_the_printed_episode_is_of_the_last_step_and_right(root: Path) -> None:
    rows = [episode(3, is_called=True, reward=0.0), episode(3, is_called=False), episode(3, is_called=True, uid="it")]
    write_rows(root / "rl" / "rollouts" / "steps-000003-000003.jsonl", rows)
    assert last_episode(root)["uid"] == "it"


@pytest.fixture(scope="module")
def tokenizer():
    rows = [multiplication_task.make_conversation(random.Random(seed), 37, 412) for seed in range(50)]
    return make_agent_model.make_tokenizer(rows, vocab_size=512)


def test_an_episode_is_shown_part_by_part_with_the_probability_of_what_was_sampled(tokenizer) -> None:
    texts = ["<|im_start|>user\nWhat is 2|3?<|im_end|>\n", "ab", "\n<|im_start|>tool\n6", "6"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    row = {
        "step": 7,
        "reward": 1.0,
        "prompt_token_ids": ids[0],
        "token_ids": [*ids[1], *ids[2], *ids[3]],
        "loss_mask": [[True, len(ids[1])], [False, len(ids[2])], [True, len(ids[3])]],
        "rollout_logprobs": [log(0.5)] * len(ids[1]) + [0.0] * len(ids[2]) + [log(0.25)] * len(ids[3]),
    }
    parts = list(episode_parts(row, tokenizer))
    assert [part.text for part in parts] == texts
    assert [part.origin for part in parts] == ["prompt", "policy", "environment", "policy"]
    assert [part.num_tokens for part in parts] == [len(each) for each in ids]
    assert [part.probability for part in parts] == [None, pytest.approx(0.5 ** len(ids[1])), None, pytest.approx(0.25)]
    lines = episode_table(row, tokenizer).splitlines()
    assert lines[2].startswith("| `<\\|im_start\\|>user\\nWhat is 2\\|3?<\\|im_end\\|>\\n` | prompt | ")
    assert lines[5] == "| `6` | policy | 1 | 0.250 |"
    assert lines[-1] == "Step 7, reward 1."


@pytest.mark.full
def test_the_command_ends_with_1_and_the_figure_if_one_is_not_enough(
    root: Path, tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.save_pretrained(root / "base")
    monkeypatch.setattr(sys, "argv", ["agent_report.py", str(root)])
    assert agent_report.main() == 0
    printed = capsys.readouterr().out
    assert "held-out greedy accuracy after RL: 90.0%" in printed and "Step 2, reward 1." in printed
    write_rows(root / "without-tool.jsonl", [{"reward": 1.0}])
    assert agent_report.main() == 1
    assert "not reached: 100.0% of the held-out products are right without the tool" in capsys.readouterr().err


def test_a_stage_that_has_not_run_is_named(root: Path) -> None:
    (root / "rl" / "metrics.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"metrics\.jsonl: cannot be read"):
        read_results(root)
