"""A producer whose episodes are agents: real processes, gateway, runner and engine thread."""

import asyncio
import shlex
import time
from pathlib import Path

from coati_rl.observability.timeline import NO_TIMELINE
from coati_rl.types import Lease, Prompt, SamplingParams
from producer.environments.chat import ChatTemplate
from producer.gateway.agent_environment import AgentCommand, AgentEnvironment
from producer.gateway.conversations import Language
from producer.group_runner import GroupRunner, RolledOut
from producer.tools.call_formats import tool_format_for
from tests.unit.gateway.speaking_engine import speaking_engine
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
