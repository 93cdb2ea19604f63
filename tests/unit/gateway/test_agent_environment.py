"""Agents as episodes of a producer's environment: real processes, gateway, runner and engine thread."""

import json
import sys

import numpy as np
import pytest

from producer.environments.chat import ChatTemplate
from tests.unit.gateway.agent_producer import MESSAGES, ROOT, TWO_TURNS, Producer, wait_for
from tests.unit.gateway.speaking_engine import logprob


def test_episodes_of_an_agent_are_trajectories_with_its_rewards(make) -> None:
    producer = make(TWO_TURNS)
    (rolled_out,) = producer.run()
    assert rolled_out.error is None
    for number, trajectory in enumerate(rolled_out.trajectories):
        ids = trajectory.token_ids[trajectory.loss_mask]
        assert trajectory.episode == number and len(trajectory.turns) == 2
        np.testing.assert_allclose(trajectory.logprobs, [logprob(int(each)) for each in ids], rtol=1e-6)
        assert trajectory.prefix.num_tokens == len(ChatTemplate(producer.tokenizer).prompt(MESSAGES))
        (reward,) = trajectory.rewards
        assert (reward.name, reward.value, reward.position) == ("env", number + 1, len(trajectory.token_ids) - 1)
    assert [(score.reward, score.verdict) for score in rolled_out.scores.values()] == [(1.0, "ok"), (2.0, "ok")]
    record = rolled_out.records[0]
    assert record["ended"] == "done" and [turn["role"] for turn in record["turns"]] == ["assistant"] * 2
    assert not any(turn.get("is_fork") for turn in record["turns"])
    wait_for(producer, lambda: not producer.engine._admission.open_episodes())  # the engine's thread closes them


@pytest.mark.full
def test_the_same_lease_gives_the_same_tokens_and_each_episode_its_own(make) -> None:
    producer = make(TWO_TURNS)
    tokens = [[each.token_ids.tolist() for each in producer.run()[0].trajectories] for _ in range(2)]
    assert tokens[0] == tokens[1] and tokens[0][0] != tokens[0][1]


def test_a_seed_of_the_agent_is_another_in_each_episode(make) -> None:
    producer = make("assert ask(task['messages'], seed=1) == ask(task['messages'], seed=1); reward(1)")
    (rolled_out,) = producer.run()
    assert rolled_out.error is None
    seeds = {request.sampling.seed for request in producer.core.requests}
    assert len(producer.core.requests) == 4 and len(seeds) == 2


def test_a_task_holds_its_row_and_the_truth_only_if_that_is_allowed(make, tmp_path) -> None:
    code = "open(os.path.dirname(sys.argv[0]) + '/told.json', 'w').write(json.dumps(task))\nask(task['messages'])\n"
    code += "assert json.load(open(os.environ['COATI_TASK'])) == task\nreward(1)"
    for is_allowed in (False, True):
        producer = make(code, with_ground_truth=is_allowed, truth_columns=frozenset({"gt_answer"}))
        (rolled_out,) = producer.run(group_size=1, columns={"gt_answer": "42", "level": 3}, purpose="eval")
        assert rolled_out.error is None
        told = json.loads((tmp_path / "told.json").read_text())
        assert (told["uid"], told["episode"], told["purpose"]) == ("p0", 0, "eval")
        assert told["messages"] == list(MESSAGES)
        assert ("ground_truth" in told, told["columns"]) == (
            is_allowed,
            {"gt_answer": "42", "level": 3} if is_allowed else {"level": 3},
        )


def test_the_scorer_is_asked_unless_only_reported_rewards_count(make) -> None:
    (rolled_out,) = make("ask(task['messages'])", rewards=False).run()
    assert rolled_out.error is None and not rolled_out.scores


@pytest.mark.full
def test_no_more_agents_run_at_a_time_than_allowed(make, tmp_path) -> None:
    code = """
places = os.path.dirname(sys.argv[0]) + "/running"
os.makedirs(places, exist_ok=True)
mine = f"{places}/{os.getpid()}"
open(mine, "w")
assert len(os.listdir(places)) <= 2
ask(task["messages"])
time.sleep(0.2)
os.unlink(mine)
reward(1)
"""
    (rolled_out,) = make(code, max_processes=2).run(group_size=5)
    assert rolled_out.error is None
    assert [score.verdict for score in rolled_out.scores.values()] == ["ok"] * 5


def test_an_episode_that_has_ended_holds_no_update_up_while_another_has_not_begun(make, tmp_path) -> None:
    """The other's first request would wait for the update, which would wait for the group to end."""
    code = """
go = os.path.dirname(sys.argv[0]) + "/go"
while task["episode"] == 1 and not os.path.exists(go):
    time.sleep(0.01)
"""
    producer = make(code + TWO_TURNS)
    producer.submit()
    opened = wait_for(producer, lambda: producer.engine._admission.open_episodes())
    assert opened == ("lease-0-0",)
    wait_for(producer, lambda: not producer.engine._admission.open_episodes())
    (tmp_path / "go").touch()
    (rolled_out,) = producer.finish()
    assert rolled_out.error is None
    assert [rolled_out.scores[number].verdict for number in range(2)] == ["ok", "ok"], "neither was waited for too long"


@pytest.mark.full
def test_the_example_of_the_documentation_runs_with_the_openai_client(monkeypatch) -> None:
    producer = Producer(
        f"{sys.executable} {ROOT}/docs/examples/checking_agent.py", with_ground_truth=True, timeout_s=60.0
    )
    try:
        (rolled_out,) = producer.run(group_size=1)
    finally:
        producer.close()
    assert rolled_out.error is None
    (trajectory,) = rolled_out.trajectories
    assert len(trajectory.turns) == 2 and rolled_out.scores[0].verdict in ("ok", "wrong")


def test_the_example_is_printed_in_the_documentation() -> None:
    text = (ROOT / "docs/examples/checking_agent.py").read_text(encoding="utf-8")
    assert f"```python\n{text}```\n" in (ROOT / "docs/agents.md").read_text(encoding="utf-8")
