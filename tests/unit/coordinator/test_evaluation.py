"""Evaluation rounds: who is asked, what counts, what is written."""

import dataclasses
import json

import pytest

from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.errors import RunError


@pytest.fixture
def board(make_prompts, tmp_path):
    tasks = {"easy": make_prompts(3, task="easy"), "hard": make_prompts(1, task="hard")}
    return EvaluationRounds(tasks, tmp_path / "eval")


@pytest.fixture
def answer(group_of):
    def make(prompt, reward, verdict="ok"):
        group = group_of([(reward, 2, verdict)])
        return dataclasses.replace(group, prompt=prompt)

    return make


def finish(board):
    """What the coordinator does when an answer is in."""
    summaries = board.write() if board.take_if_done() else []
    if summaries:
        board.close()
    return summaries


def draw_all(board):
    prompts = []
    while (prompt := board.draw()) is not None:
        prompts.append(prompt)
    return prompts


def test_a_round_asks_every_prompt_of_every_task_once(board):
    assert not board.is_running and not board.has_pending and board.draw() is None
    board.start(4)
    assert board.is_running and board.has_pending
    assert [prompt.uid for prompt in draw_all(board)] == ["easy-0", "easy-1", "easy-2", "hard-0"]
    assert board.is_running and not board.has_pending


def test_accuracy_is_over_all_prompts_and_what_failed_or_could_not_be_scored_is_not_correct(board, answer, tmp_path):
    board.start(4)
    easy, failed, invalid, hard = draw_all(board)
    board.add(answer(hard, 0.0))
    board.add(answer(easy, 1.0))
    board.add(answer(invalid, 0.0, "invalid"))
    assert finish(board) == [], "one answer is missing"
    board.add_failure(failed)
    summaries = finish(board)
    assert summaries == [
        {
            "step": 4,
            "task": "easy",
            "policy_versions": [7],
            "accuracy": 1 / 3,
            "num_prompts": 3,
            "num_invalid": 1,
            "num_failed": 1,
        },
        {
            "step": 4,
            "task": "hard",
            "policy_versions": [7],
            "accuracy": 0.0,
            "num_prompts": 1,
            "num_invalid": 0,
            "num_failed": 0,
        },
    ]
    assert [json.loads(line) for line in (tmp_path / "eval/summary.jsonl").read_text().splitlines()] == summaries
    assert not board.is_running


@pytest.mark.parametrize("name", ["summary.jsonl", "easy-step-000004.jsonl"])
def test_a_full_disk_is_told_with_path_and_remedy(board, answer, tmp_path, name):
    board.start(4)
    for prompt in draw_all(board):
        board.add(answer(prompt, 1.0))
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / name).symlink_to("/dev/full")
    with pytest.raises(RunError, match=f"{tmp_path}/eval cannot be written: No space left on device; free space"):
        finish(board)


def test_every_answer_is_written_in_the_order_of_the_prompts(board, answer, tmp_path):
    board.start(4)
    for prompt in reversed(draw_all(board)):
        board.add(answer(prompt, 1.0))
    finish(board)
    lines = [json.loads(line) for line in (tmp_path / "eval/easy-step-000004.jsonl").read_text().splitlines()]
    assert [line["uid"] for line in lines] == ["easy-0", "easy-1", "easy-2"]
    assert lines[1] == {
        "uid": "easy-1",
        "prompt": "",
        "gt_answer": "1",
        "response": "xx",
        "finish_reason": "stop",
        "reward": 1.0,
        "answer_correct": True,
        "format_valid": True,
        "verdict": "ok",
        "detail": "",
    }


def test_an_answer_is_written_with_the_parts_of_its_reward_and_why_it_could_not_be_scored(board, answer, tmp_path):
    board.start(4)
    prompts = draw_all(board)
    for prompt in prompts:
        group = answer(prompt, 0.5, "invalid")
        score = dataclasses.replace(group.scores[0], detail="no answer in time", breakdown={"boxed": 1.0})
        board.add(dataclasses.replace(group, scores=(score,)))
    finish(board)
    line = json.loads((tmp_path / "eval/hard-step-000004.jsonl").read_text())
    assert (line["verdict"], line["detail"], line["breakdown"]) == ("invalid", "no answer in time", {"boxed": 1.0})


def test_an_episode_of_several_turns_and_forks_is_one_line_with_its_last_answer(make_prompts, forked_group, tmp_path):
    (prompt,) = make_prompts(1, task="tools")
    board = EvaluationRounds({"tools": [prompt]}, tmp_path)
    board.start(4)
    group = forked_group()
    first, fork, _ = group.trajectories
    board.add(dataclasses.replace(group, prompt=prompt, trajectories=(first, fork), scores=group.scores[:1]))
    (summary,) = finish(board)
    assert (summary["accuracy"], summary["policy_versions"]) == (1.0, [7, 8])
    (line,) = map(json.loads, (tmp_path / "tools-step-000004.jsonl").read_text().splitlines())
    assert (line["response"], line["finish_reason"], line["reward"]) == ("turn 2 of episode 0", "length", 1.0)


def test_a_second_round_starts_from_nothing_and_its_summary_is_appended(board, answer, tmp_path):
    for step in (0, 4):
        board.start(step)
        for prompt in draw_all(board):
            board.add(answer(prompt, float(step > 0)))
        assert [summary["accuracy"] for summary in finish(board)] == [float(step > 0)] * 2
    assert len((tmp_path / "eval/summary.jsonl").read_text().splitlines()) == 4
