"""Agents as episodes of a producer's environment: real processes, gateway, runner and engine thread."""

import asyncio
import json
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from coati_rl.errors import EngineError
from coati_rl.observability.timeline import NO_TIMELINE
from coati_rl.types import Lease, Prompt, SamplingParams
from producer.engines.admission import RequestRefusedError
from producer.environments.chat import ChatTemplate
from producer.gateway.agent_environment import AgentCommand, AgentEnvironment
from producer.gateway.conversations import Language
from producer.group_runner import GroupRunner, RolledOut
from producer.tools.call_formats import tool_format_for
from tests.unit.gateway.speaking_engine import logprob, speaking_engine
from tests.unit.producer.chat_families import family_tokenizer

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 40.0
SAMPLING = SamplingParams(temperature=0.9, max_new_tokens=100, seed=5)
MESSAGES = ({"role": "user", "content": "What is 17 + 25?"},)

# An agent of the standard library. `ask` is a call of chat completions, `post` any other.
AGENT = """
import json, os, sys, time, urllib.request
task = json.load(sys.stdin)
def post(url, body):
    key = os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=30))
def ask(messages, **more):
    body = {"model": "m", "messages": messages, **more}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
def reward(value):
    post(os.environ["COATI_REWARD_URL"], {"reward": value})
"""
TWO_TURNS = """
messages = task["messages"]
for turn in range(2):
    messages += [ask(messages), {"role": "user", "content": f"Again, {turn}."}]
reward(task["episode"] + 1)
"""


class Producer:
    """One engine, one environment of agents, and their runner."""

    def __init__(self, command: str, /, *, rewards: bool = True, **agent) -> None:
        tokenizer = family_tokenizer("qwen2_5")
        self.engine, self.core = speaking_engine(tokenizer, lambda prompt, seed: f" It is {seed % 97}.")
        self.tokenizer = tokenizer
        settings = {"timeout_s": 20.0, "max_processes": 8, "with_ground_truth": False, "truth_columns": frozenset()}
        self.environment = AgentEnvironment(
            AgentCommand(**{"command": tuple(shlex.split(command)), **settings, **agent}),
            Language(tokenizer, ChatTemplate(tokenizer), tool_format_for(tokenizer)),
            correct_from={"default": 1.0} if rewards else {},
        )
        self.runner = GroupRunner(self.engine, self.environment, max_sequences=64, group_size=2, timeline=NO_TIMELINE)

    def submit(self, *, group_size: int = 2, **prompt) -> None:
        ids = ChatTemplate(self.tokenizer).prompt(MESSAGES)
        fields = {"token_ids": ids, "messages": MESSAGES, "ground_truth": "42", **prompt}
        lease = Lease(lease_id=0, prompt=Prompt(uid="p0", **fields), group_size=group_size, sampling=SAMPLING)
        self.runner.submit([lease], min_policy_version=0)

    def finish(self) -> list[RolledOut]:
        return wait_for(self, lambda: self.runner.take_finished(0.1))

    def run(self, **options) -> list[RolledOut]:
        self.submit(**options)
        return self.finish()

    def close(self) -> None:
        if not self.runner._loop.is_closed():
            self.runner.close()
        self.environment.close()
        self.engine.close()


def wait_for(producer: Producer, condition):
    """What a condition returns, once that is something; the producer goes on meanwhile."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        producer.runner._loop.run_until_complete(asyncio.sleep(0.01))
    return found


@pytest.fixture
def make(tmp_path):
    producers = []

    def make(code: str, **options) -> Producer:
        script = tmp_path / "agent.py"
        script.write_text(AGENT + code)
        producers.append(Producer(f"{sys.executable} -S {script}", **options))
        return producers[-1]

    yield make
    for producer in producers:
        producer.close()


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
    assert not producer.engine._admission.open_episodes()


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


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("ask(task['messages']); raise ValueError('no luck')", "agent: exit code 1: ValueError: no luck"),
        ("pass", "agent: it ended without a call that was answered"),
        ("ask(task['messages']); time.sleep(600)", "agent: not done within 3 s"),
        (
            "ask(task['messages'])",
            "agent: it reported no reward, and no other counts (-rt env)",
        ),
        (
            "ask(task['messages'], temperature=0)",
            "agent: exit code 1: urllib.error.HTTPError: HTTP Error 400: Bad Request",
        ),
    ],
)
def test_an_agent_that_fails_makes_its_own_sample_invalid_and_no_other(make, code, detail) -> None:
    bad = f"\nif task['episode'] == 0:\n    {code}\n    sys.exit(0)\n" + TWO_TURNS
    (rolled_out,) = make(bad, timeout_s=3.0).run()
    first, second = rolled_out.scores[0], rolled_out.scores[1]
    assert (first.verdict, first.detail) == ("invalid", detail)
    assert (second.verdict, second.reward) == ("ok", 2.0)
    assert [each.episode for each in rolled_out.trajectories] == [0, 1]


def test_an_agent_that_reports_a_failure_of_the_engine_as_a_zero_is_invalid(make) -> None:
    code = """
try:
    ask(task["messages"])
except urllib.error.HTTPError as error:
    assert (error.code, error.headers["x-should-retry"]) == (503, "false")
ask([*task["messages"], *task["messages"]])
reward(0)
"""
    producer, refused = make(code), set()

    def speech(prompt: str, seed: int) -> str:
        if prompt.count("17") == 1 and not refused:  # of one episode, whichever is first
            refused.add(seed)
            raise RequestRefusedError("a broken kernel")
        return " It is 42."

    producer.core.speech = speech
    (rolled_out,) = producer.run()
    assert sorted(score.verdict for score in rolled_out.scores.values()) == ["invalid", "wrong"]
    (detail,) = [score.detail for score in rolled_out.scores.values() if score.verdict == "invalid"]
    assert detail == "agent: a broken kernel"


def test_an_agent_that_is_cut_while_it_waits_for_a_place_is_never_started(make, tmp_path) -> None:
    code = "open(f'{os.path.dirname(sys.argv[0])}/started-{task[\"episode\"]}', 'w'); ask(task['messages'])\n"
    producer = make(code + "time.sleep(600)", max_processes=1)
    producer.submit(group_size=3)
    wait_for(producer, lambda: producer.core.requests and not producer.core.running)
    producer.runner.cut([0])
    (rolled_out,) = producer.finish()
    assert rolled_out.error.startswith("all 3 episodes failed, the first one because: agent: it was cut")
    assert len(list(tmp_path.glob("started-*"))) == 1


def test_a_prompt_fails_if_all_of_its_agents_do(make) -> None:
    (rolled_out,) = make("sys.exit(7)").run()
    assert rolled_out.error == "all 2 episodes failed, the first one because: agent: exit code 7"


def test_a_command_that_the_system_does_not_start_is_a_failed_episode() -> None:
    producer = Producer("", command=("true", "x" * 200_000))
    try:
        (rolled_out,) = producer.run()
    finally:
        producer.close()
    cause = "agent: it could not be started: [Errno 7] Argument list too long"
    assert rolled_out.error.startswith(f"all 2 episodes failed, the first one because: {cause}")


def test_the_scorer_is_asked_unless_only_reported_rewards_count(make) -> None:
    (rolled_out,) = make("ask(task['messages'])", rewards=False).run()
    assert rolled_out.error is None and not rolled_out.scores


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


def test_agents_that_are_cut_are_invalid_and_those_that_have_ended_are_not(make) -> None:
    producer = make("if task['episode'] == 1:\n    ask(task['messages'])\n    time.sleep(600)\n" + TWO_TURNS)
    producer.submit()
    wait_for(producer, lambda: len(producer.core.requests) == 3 and not producer.core.running)
    wait_for(producer, lambda: len(producer.engine._admission.open_episodes()) == 1)
    producer.runner.cut([0])
    (rolled_out,) = producer.finish()
    assert [score.verdict for score in rolled_out.scores.values()] == ["ok", "invalid"]
    assert rolled_out.scores[1].detail == "agent: it was cut, as trainers waited for it (--stale-episodes cut)"


def test_the_end_of_the_engine_ends_the_producer_and_the_agents(make) -> None:
    producer = make("ask(task['messages']); time.sleep(600)")
    producer.submit(group_size=1)
    wait_for(producer, lambda: producer.core.requests)
    producer.engine.close()
    with pytest.raises(EngineError):
        producer.runner.take_finished(1.0)
    begin = time.monotonic()
    producer.runner.close()
    producer.environment.close()
    assert time.monotonic() - begin < 10
    assert not producer.environment._directory.exists()


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
