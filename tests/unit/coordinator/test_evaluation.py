"""Test evaluation rounds: prompts, accuracy, files."""

import dataclasses
import json

import pytest

from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.errors import RunError


@pytest.fixture
def rounds(make_prompts, tmp_path):
    tasks = {"easy": make_prompts(3, name="easy"), "hard": make_prompts(1, name="hard")}
    return EvaluationRounds(tasks, tmp_path / "eval")


@pytest.fixture
def answer(group_of):
    def make(prompt, reward, verdict="ok"):
        group = group_of([(reward, 2, verdict)])
        return dataclasses.replace(group, prompt=prompt)

    return make


def finish(rounds):
    """Finish a round as the coordinator does when all answers are received."""
    summaries = rounds.write() if rounds.take_if_done() else []
    if summaries:
        rounds.close()
    return summaries


def draw_all(rounds):
    prompts = []
    while (prompt := rounds.draw()) is not None:
        prompts.append(prompt)
    return prompts


def test_a_round_asks_every_prompt_of_every_task_once(rounds):
    assert not rounds.is_running and not rounds.has_pending and rounds.draw() is None
    rounds.start(4)
    assert rounds.is_running and rounds.has_pending
    assert [prompt.uid for prompt in draw_all(rounds)] == ["easy-0", "easy-1", "easy-2", "hard-0"]
    assert rounds.is_running and not rounds.has_pending


def test_accuracy_is_over_all_prompts_and_what_failed_or_could_not_be_scored_is_not_correct(rounds, answer, tmp_path):
    rounds.start(4)
    easy, failed, invalid, hard = draw_all(rounds)
    rounds.add(answer(hard, 0.0))
    rounds.add(answer(easy, 1.0))
    rounds.add(answer(invalid, 0.0, "invalid"))
    assert finish(rounds) == [], "one answer is missing"
    rounds.add_failure(failed)
    summaries = finish(rounds)
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
    assert not rounds.is_running


@pytest.mark.parametrize("name", ["summary.jsonl", "easy-step-000004.jsonl"])
def test_a_full_disk_is_told_with_path_and_remedy(rounds, answer, tmp_path, name):
    rounds.start(4)
    for prompt in draw_all(rounds):
        rounds.add(answer(prompt, 1.0))
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / name).symlink_to("/dev/full")
    with pytest.raises(RunError, match=f"{tmp_path}/eval cannot be written: No space left on device; free space"):
        finish(rounds)


def test_every_answer_is_written_in_the_order_of_the_prompts(rounds, answer, tmp_path):
    rounds.start(4)
    for prompt in reversed(draw_all(rounds)):
        rounds.add(answer(prompt, 1.0))
    finish(rounds)
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


def test_an_answer_is_written_with_the_parts_of_its_reward_and_why_it_could_not_be_scored(rounds, answer, tmp_path):
    rounds.start(4)
    prompts = draw_all(rounds)
    for prompt in prompts:
        group = answer(prompt, 0.5, "invalid")
        score = dataclasses.replace(group.scores[0], detail="no answer in time", breakdown={"boxed": 1.0})
        rounds.add(dataclasses.replace(group, scores=(score,)))
    finish(rounds)
    line = json.loads((tmp_path / "eval/hard-step-000004.jsonl").read_text())
    assert (line["verdict"], line["detail"], line["breakdown"]) == ("invalid", "no answer in time", {"boxed": 1.0})


def test_an_episode_of_several_turns_and_forks_is_one_line_with_its_last_answer(make_prompts, forked_group, tmp_path):
    (prompt,) = make_prompts(1, name="tools")
    rounds = EvaluationRounds({"tools": [prompt]}, tmp_path)
    rounds.start(4)
    group = forked_group()
    first, fork, _ = group.trajectories
    rounds.add(dataclasses.replace(group, prompt=prompt, trajectories=(first, fork), scores=group.scores[:1]))
    (summary,) = finish(rounds)
    assert (summary["accuracy"], summary["policy_versions"]) == (1.0, [7, 8])
    (line,) = map(json.loads, (tmp_path / "tools-step-000004.jsonl").read_text().splitlines())
    assert (line["response"], line["finish_reason"], line["reward"]) == ("turn 2 of episode 0", "length", 1.0)


def test_a_second_round_starts_from_nothing_and_its_summary_is_appended(rounds, answer, tmp_path):
    for step in (0, 4):
        rounds.start(step)
        for prompt in draw_all(rounds):
            rounds.add(answer(prompt, float(step > 0)))
        assert [summary["accuracy"] for summary in finish(rounds)] == [float(step > 0)] * 2
    assert len((tmp_path / "eval/summary.jsonl").read_text().splitlines()) == 4
