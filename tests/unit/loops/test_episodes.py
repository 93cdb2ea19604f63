"""Test whole runs in threads whose prompts are episodes of several turns."""

import json
from pathlib import Path

import pytest

from coati_rl.errors import RunError

TALK = {
    "env": f"{Path(__file__).parent}/talk.py:Talk",
    "chat_template": "chatml",
    "max_episode_tokens": 400,
    "reward_type": "env",
}


def records(directory):
    return [json.loads(line) for path in sorted(directory.iterdir()) for line in path.read_text().split("\n")[:-1]]


@pytest.mark.full
def test_rollouts_metrics_and_evaluations_are_of_episodes(run_in_threads, write_prompts):
    trace = run_in_threads({**TALK, "eval_dataset": {"math": write_prompts("math", 2)}, "eval_interval": 2})
    assert all(len(each.turns) == 2 for group in trace.groups for each in group.trajectories)
    line = records(trace.paths.rollouts)[0]
    assert line["environment"]["ended"] == "done"
    assert [turn["role"] for turn in line["environment"]["turns"]] == ["prompt", "assistant", "user", "assistant"]
    assert [message["role"] for message in line["messages"]] == ["user", "assistant", "user", "assistant"]
    assert (line["messages"][2]["content"], line["messages"][-1]["content"]) == ("again", line["response"])
    answered = next(each for each in records(trace.paths.evaluation) if "messages" in each)
    assert [message["role"] for message in answered["messages"]] == ["user", "assistant", "user", "assistant"]
    assert line["reward"] == sum(value for _, _, value in line["token_rewards"])
    step = trace.steps[0]
    assert step["turns_mean"] == 2.0
    assert 0 < step["environment_s_mean"] < 10.0
    assert step["reward_mean"] > 0 and step["samples_invalid"] == 0
    evaluated = [group for group in trace.groups if group.prompt.purpose == "eval"]
    assert {len(group.trajectories[0].turns) for group in evaluated} == {2}
    assert {lease.sampling.temperature for lease in trace.leases if lease.prompt.purpose == "eval"} == {0.0}
    assert {event["num_prompts"] for event in trace.of("evaluation")} == {2}


def test_rewards_of_an_environment_are_added_to_those_of_a_named_reward(run_in_threads):
    trace = run_in_threads({**TALK, "reward_type": "boxed", "max_steps": 1})
    for group in trace.groups:
        for trajectory, score in zip(group.trajectories, group.scores, strict=True):
            given, scored = score.breakdown["env"], score.breakdown["response"]
            assert given == sum(reward.value for reward in trajectory.rewards)
            assert (score.reward, scored) == (given + scored, float(len(trajectory.text) % 2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reward_type", ["env", "boxed"])
def test_scores_of_an_agent_are_filtered_by_and_its_logs_are_metrics(run_in_threads, reward_type):
    agent = f"{Path(__file__).parent}/scored_agent.py"
    settings = {"env": agent, "filter_range": [0.01, 0.99], "max_steps": 2, "reward_type": reward_type}
    trace = run_in_threads({**TALK, **settings})
    assert [step["groups_filtered"] for step in trace.steps] == [0, 0]  # a mean reward of 7 is out of the range
    odd = [len(each.text) % 2 for group in trace.groups for each in group.trajectories]
    scores = [score for group in trace.groups for score in group.scores]
    is_added = reward_type == "boxed"  # the scorer gives 1 to an answer of odd length
    assert [score.reward for score in scores] == [7.0 + each * (1 + is_added) for each in odd]
    assert [score.filter_score for score in scores] == [0.25 + each / 2 for each in odd]
    assert [score.answer_correct for score in scores] == [is_added and each == 1 for each in odd]  # no score is 1
    lines = records(trace.paths.rollouts)
    for step in trace.steps:
        of_step = [line["environment"]["metrics"]["is_odd"] for line in lines if line["step"] == step["step"]]
        assert step["agent/is_odd_mean"] == pytest.approx(sum(of_step) / len(of_step))
        assert not [key for key in step if key.startswith("agent/said")]


def test_a_run_whose_episodes_all_fail_ends_with_the_cause(run_in_threads):
    with pytest.raises(RunError, match=r"samples failed because: all 2 episodes failed, .* the world has ended"):
        run_in_threads({**TALK, "env_arg": ["fails=true"]})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_flight", [False, True])
def test_no_episode_is_staler_than_the_bound_however_long_it_takes(run_in_threads, in_flight):
    """Each second episode takes 0.3 s a turn, in which the trainer is done with the other prompts."""
    trace = run_in_threads(
        {**TALK, "env_arg": ["wait_s=0.1"], "n_behind": 1, "inflight_update": in_flight, "num_episodes": 2}
    )
    assert {step["staleness_max"] for step in trace.steps} <= {0, 1}
    assert len(trace.steps) == 8
    uids = [group.prompt.uid for group in trace.groups]
    assert len(uids) == len(set(uids)) == 16, "each prompt of both passes was rolled out once"
    if not in_flight:
        versions = [set(each.policy_versions.tolist()) for group in trace.groups for each in group.trajectories]
        assert all(len(each) == 1 for each in versions), "a commit waited for open episodes"
