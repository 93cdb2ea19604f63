"""Test whole runs in threads with --algo REMAX: advantages R - R(greedy answer), which is no sample anywhere."""

import json
import sys

import pytest

from tests.unit.loops.harness import parity_reward
from tests.unit.loops.test_episodes import TALK

REMAX = {"algo": "REMAX", "kl_coeff": 0.0}


def lines_of(trace):
    return [json.loads(line) for path in sorted(trace.paths.rollouts.iterdir()) for line in path.open()]


def groups_of(trace):
    """(lines, their group, whose reward the greedy answer has) of each prompt."""
    lines, found = lines_of(trace), []
    for group in trace.groups:
        if group.prompt.purpose == "train":
            found.append(([line for line in lines if line["uid"] == group.prompt.uid], group))
    assert len(found) == len({line["uid"] for line in lines}) > 1
    return found


def greedy_answers(trace):
    """Lease id -> the greedy requests and answers of its prompt, in order."""
    (engine,), found = trace.engines, {}
    for request in engine.requests:
        number = int(request.request_id.removeprefix("lease-").partition("/")[0])
        if request.sampling.temperature == 0:
            found.setdefault(number, []).append((request, engine.results[request.request_id]))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("group_size", [1, 2])
def test_advantages_of_single_turns_are_rewards_less_the_greedy_answers(run_in_threads, write_prompts, group_size):
    sizes = {"num_generations": group_size, "train_microbatch_size": 2}
    evaluation = {"eval_dataset": {"math": write_prompts("math", 2)}, "eval_interval": 4}
    trace = run_in_threads({**REMAX, **sizes, **evaluation})
    greedy, rewards = greedy_answers(trace), []
    for lines, group in groups_of(trace):
        ((request, result),) = greedy[group.lease_id]
        assert (request.token_ids, request.num_samples) == (group.prompt.token_ids, 1)
        baseline = parity_reward(result.completions[0].text, "1").reward
        assert [line["baseline_reward"] for line in lines] == [baseline] * group_size
        assert [line["advantage"] for line in lines] == [line["reward"] - baseline for line in lines]
        assert all(set(line["policy_versions"]) == {int(result.completions[0].policy_versions[0])} for line in lines)
        sampled = [line["token_ids"] for line in lines]
        assert result.completions[0].token_ids.tolist() not in sampled and len(sampled) == group_size
        rewards.append(baseline)
    assert {0.0, 1.0} == set(rewards) and len({line["advantage"] for line in lines_of(trace)}) == 3
    assert len(trace.steps) == 4
    for step in trace.steps:
        of_step = [line for line in lines_of(trace) if line["step"] == step["step"]]
        mean = sum(line["baseline_reward"] for line in of_step) / len(of_step)
        assert step["baseline_reward_mean"] == pytest.approx(mean)
        assert step["samples_in_loss"] == len(of_step) == 2 * group_size
        assert step["num_response_tokens"] == sum(line["num_tokens"] for line in of_step)
    evaluated = [lease for lease in trace.leases if lease.prompt.purpose == "eval"]
    assert [lease.has_baseline for lease in evaluated] == [False] * len(evaluated) != []
    (engine,) = trace.engines
    assert engine.max_sequences <= 2 * (group_size + 1) == engine.settings["max_num_seqs"]  # -imbs 2


def test_advantages_of_episodes_are_their_rewards_less_those_of_a_greedy_episode(run_in_threads):
    trace = run_in_threads({**REMAX, **TALK})
    greedy, differ = greedy_answers(trace), set()
    for lines, group in groups_of(trace):
        turns = greedy[group.lease_id]
        assert [request.episode_id for request, _ in turns] == [f"lease-{group.lease_id}-2"] * 2
        baseline = sum(len(result.completions[0].text) % 2 for _, result in turns)
        assert [line["baseline_reward"] for line in lines] == [baseline] * 2
        assert [line["advantage"] for line in lines] == [line["reward"] - baseline for line in lines]
        assert [line["episode"] for line in lines] == [0, 1] and len(group.records) == 2
        answers = [result.completions[0].token_ids.tolist() for _, result in turns]
        for line in lines:
            assert answers[0] not in [line["token_ids"][start:end] for start, end, _ in line["turns"]]
        differ.add(baseline)
    assert len(differ) > 1


def test_samples_of_a_greedy_answer_without_a_reward_are_invalid_and_counted(run_in_threads, caplog):
    """The third answer to a prompt is the greedy one; that of the first prompt cannot be scored."""
    asked = []

    def score(response, ground_truth):
        asked.append(response)
        found = parity_reward(response, ground_truth)
        if len(asked) != 3:
            return found
        return type(found)(reward=0.0, answer_correct=False, format_valid=False, verdict="invalid", detail="no idea")

    trace = run_in_threads({**REMAX, "max_failure_rate": 0.5}, score=score)
    lost = [line for line in lines_of(trace) if line["baseline_reward"] is None]
    assert [line["is_trained"] for line in lost] == [False, False] and len({line["uid"] for line in lost}) == 1
    assert sum(step["samples_failed"] for step in trace.steps) == 2
    assert sum(step["samples_invalid"] for step in trace.steps) == 2
    assert all(step["samples_in_loss"] == 4 for step in trace.steps)
    told = f"sample 0 of prompt {lost[0]['uid']} could not be scored: the greedy answer to its prompt has no reward: "
    assert any(message.startswith(f"{told}no idea") for message in caplog.messages)


AGENT = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def post(url, body):
    key = os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
body = {"model": "m", "messages": task["messages"], "temperature": 1.3, "n": 2}
answers = [each["message"] for each in post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"]]
post(os.environ["COATI_REWARD_URL"], {"reward": float(task["episode"] + 1)})
"""


@pytest.mark.full
def test_calls_of_an_agent_are_greedy_in_the_last_episode_though_it_asks_for_a_temperature(run_in_threads, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    settings = {"agent_command": f"{sys.executable} {tmp_path}/agent.py", "reward_type": "env", "max_steps": 1}
    trace = run_in_threads({**REMAX, **TALK, "env": None, **settings, "max_failure_rate": 1.0})
    for _, group in groups_of(trace):
        assert (group.baseline.score.reward, [score.reward for score in group.scores]) == (3.0, [1.0, 2.0])
    (engine,) = trace.engines
    of_training = [request for request in engine.requests if request.episode_id is not None]
    asked = {(request.episode_id.rpartition("-")[2], request.sampling.temperature) for request in of_training}
    assert asked == {("0", 1.3), ("1", 1.3), ("2", 0.0)}
