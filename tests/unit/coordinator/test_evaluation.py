"""Test evaluation rounds: prompts, accuracy, files."""

import dataclasses
import json

import pytest

from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.leases import SamplingPlan
from coati_rl.errors import RunError
from coati_rl.observability.records import evaluation_metrics
from coati_rl.types import SamplingParams


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
            "reward_mean": 1.0,
            "reward_max": 1.0,
            "num_invalid": 1,
            "num_failed": 1,
        },
        {
            "step": 4,
            "task": "hard",
            "policy_versions": [7],
            "accuracy": 0.0,
            "num_prompts": 1,
            "reward_mean": 0.0,
            "reward_max": 0.0,
            "num_invalid": 0,
            "num_failed": 0,
        },
    ]
    assert [json.loads(line) for line in (tmp_path / "eval/summary.jsonl").read_text().split("\n")[:-1]] == summaries
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
    lines = [json.loads(line) for line in (tmp_path / "eval/easy-step-000004.jsonl").read_text().split("\n")[:-1]]
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
    played = {"ended": "done", "turns": [{"role": "policy"}, {"role": "user"}, {"role": "policy"}]}
    said = [
        [{"role": "user", "content": "Q"}],
        [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
    ]
    records = ({**played, "conversations": said},)
    own = {"prompt": prompt, "trajectories": (first, fork), "scores": group.scores[:1], "records": records}
    rounds.add(dataclasses.replace(group, **own))
    (summary,) = finish(rounds)
    assert (summary["accuracy"], summary["policy_versions"]) == (1.0, [7, 8])
    (line,) = map(json.loads, (tmp_path / "tools-step-000004.jsonl").read_text().splitlines())
    assert (line["response"], line["finish_reason"], line["reward"]) == ("turn 2 of episode 0", "length", 1.0)
    assert line["environment"] == played and line["messages"] == said[1]


def test_each_sample_of_an_environment_has_its_own_record_and_an_answer_without_one_has_none(
    make_prompts, group_of, tmp_path
):
    with_record, without = make_prompts(2, name="tools")
    plan = SamplingPlan(group_size=2, sampling=SamplingParams(temperature=1.0))
    rounds = EvaluationRounds({"tools": [with_record, without]}, tmp_path, plan=plan)
    rounds.start(4)
    group, records = group_of([(1.0, 2), (0.0, 3)]), ({"ended": "done"}, {"ended": "turns"})
    rounds.add(dataclasses.replace(group, prompt=with_record, records=records))
    rounds.add(dataclasses.replace(group, prompt=without))
    finish(rounds)
    lines = [*map(json.loads, (tmp_path / "tools-step-000004.jsonl").read_text().splitlines())]
    assert [line.get("environment") for line in lines] == [*records, None, None]
    assert ["environment" in line for line in lines] == [True, True, False, False]


def test_a_second_round_starts_from_nothing_and_its_summary_is_appended(rounds, answer, tmp_path):
    for step in (0, 4):
        rounds.start(step)
        for prompt in draw_all(rounds):
            rounds.add(answer(prompt, float(step > 0)))
        assert [summary["accuracy"] for summary in finish(rounds)] == [float(step > 0)] * 2
    assert len((tmp_path / "eval/summary.jsonl").read_text().splitlines()) == 4


def sampled(tmp_path, num_samples, temperature=0.8, **tasks):
    plan = SamplingPlan(group_size=num_samples, sampling=SamplingParams(temperature=temperature))
    return EvaluationRounds(tasks, tmp_path / "eval", plan=plan)


def test_several_samples_give_avg_and_pass_at_k_and_a_failed_prompt_counts_as_wrong_ones(
    make_prompts, group_of, tmp_path
):
    rounds = sampled(tmp_path, 4, easy=make_prompts(3, name="easy"))
    rounds.start(4)
    first, second, failed = draw_all(rounds)
    for prompt, rewards in [(first, [1.0, 0.0, 0.0, 0.0]), (second, [1.0, 1.0, 0.0, 1.0])]:
        group = group_of([(reward, 2, "ok" if reward else "invalid") for reward in rewards])
        rounds.add(dataclasses.replace(group, prompt=prompt))
    rounds.add_failure(failed)
    (summary,) = finish(rounds)
    # Of 4 samples 1, 3 and 0 are correct: pass@2 is (1/2 + 1 + 0) / 3, pass@4 is (1 + 1 + 0) / 3.
    assert summary == {
        "step": 4,
        "task": "easy",
        "policy_versions": [7],
        "accuracy": pytest.approx(4 / 12),
        "num_prompts": 3,
        "num_samples": 4,
        "temperature": 0.8,
        "avg@4": pytest.approx(4 / 12),
        "pass@1": pytest.approx(4 / 12),
        "pass@2": pytest.approx(1.5 / 3),
        "pass@4": pytest.approx(2 / 3),
        "reward_mean": 1.0,
        "reward_max": 1.0,
        "num_invalid": 4,
        "num_failed": 1,
    }
    lines = [json.loads(line) for line in (tmp_path / "eval/easy-step-000004.jsonl").read_text().split("\n")[:-1]]
    assert [(line["uid"], line["sample"]) for line in lines] == [(f"easy-{p}", s) for p in (0, 1) for s in range(4)]
    assert [line["answer_correct"] for line in lines] == [True, False, False, False, True, True, False, True]


def test_one_sampled_answer_says_how_it_was_sampled(make_prompts, answer, tmp_path):
    rounds = sampled(tmp_path, 1, easy=make_prompts(1, name="easy"))
    rounds.start(0)
    rounds.add(answer(rounds.draw(), 1.0))
    (summary,) = finish(rounds)
    assert (summary["num_samples"], summary["temperature"], summary["accuracy"]) == (1, 0.8, 1.0)
    assert not {"avg@1", "pass@1"} & summary.keys()


def test_a_set_of_several_tasks_has_the_figures_of_each(make_prompts, group_of, tmp_path):
    prompts = [
        dataclasses.replace(prompt, task=task)
        for prompt, task in zip(make_prompts(3, name="mixed"), ("math", "code", "math"), strict=True)
    ]
    rounds = sampled(tmp_path, 2, mixed=prompts)
    rounds.start(0)
    for prompt, rewards in zip(draw_all(rounds), ([1.0, 0.0], [0.0, 0.0], [1.0, 1.0]), strict=True):
        rounds.add(dataclasses.replace(group_of([(reward, 2) for reward in rewards]), prompt=prompt))
    (summary,) = finish(rounds)
    assert (summary["accuracy"], summary["pass@2"]) == (0.5, pytest.approx(2 / 3))
    sampling = {"num_samples": 2, "temperature": 0.8}
    math, code = {"reward_mean": 0.75, "reward_max": 1.0}, {"reward_mean": 0.0, "reward_max": 0.0}
    assert summary["by_task"] == {
        "math": {"accuracy": 0.75, "num_prompts": 2, **sampling, "avg@2": 0.75, "pass@1": 0.75, "pass@2": 1.0, **math},
        "code": {"accuracy": 0.0, "num_prompts": 1, **sampling, "avg@2": 0.0, "pass@1": 0.0, "pass@2": 0.0, **code},
    }
    assert evaluation_metrics(summary) == {
        "eval/mixed/accuracy": 0.5,
        "eval/mixed/avg@2": 0.5,
        "eval/mixed/pass@1": 0.5,
        "eval/mixed/pass@2": pytest.approx(2 / 3),
        "eval/mixed/reward_mean": 0.5,
        "eval/mixed/reward_max": 1.0,
        **{f"eval/mixed/math/{key}": value for key, value in math.items()},
        **{f"eval/mixed/code/{key}": value for key, value in code.items()},
        **{f"eval/mixed/math/{key}": 0.75 for key in ("accuracy", "avg@2", "pass@1")},
        "eval/mixed/math/pass@2": 1.0,
        **{f"eval/mixed/code/{key}": 0.0 for key in ("accuracy", "avg@2", "pass@1", "pass@2")},
    }


def test_graded_rewards_have_mean_and_maximum_beside_the_reward_that_a_correct_answer_needs(
    make_prompts, answer, tmp_path
):
    easy, hard = ([dataclasses.replace(each, task=name) for each in make_prompts(2, name=name)] for name in ("a", "b"))
    sets = {"easy": easy, "both": [easy[0], hard[0]], "hard": hard}
    sets = {name: [dataclasses.replace(each, eval_set=name) for each in prompts] for name, prompts in sets.items()}
    rounds = EvaluationRounds(sets, tmp_path, correct_from={"a": 0.8})
    rounds.start(0)
    for prompt, reward in zip(draw_all(rounds), (0.25, 0.5, 0.5, 1.0, 0.0, 9.0), strict=True):
        rounds.add(answer(prompt, reward, "invalid" if reward == 9 else "ok"))
    keys = ("reward_mean", "reward_max", "correct_from")
    assert [[summary.get(key) for key in keys] for summary in finish(rounds)] == [
        [0.375, 0.5, 0.8],
        [0.75, 1.0, None],  # the rewards of task b say themselves what is correct
        [0.0, 0.0, None],
    ]
    nothing = EvaluationRounds({"hard": sets["hard"]}, tmp_path)
    nothing.start(0)
    for prompt in draw_all(nothing):
        nothing.add(answer(prompt, 9.0, "invalid"))
    (summary,) = finish(nothing)
    assert [summary[key] for key in keys[:2]] == [None, None]
