"""Test episodes with tools: calls and results in turns, what ends them, and what is trained."""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from coati_rl.config.environment import EnvironmentConfig
from coati_rl.types import Completion, Prompt, SamplingParams
from producer.environments.chat import ChatTemplate
from producer.environments.environment import Rollout
from producer.environments.episode import EpisodeFailure, EpisodeLimits
from producer.environments.episode_environment import EpisodeEnvironment
from producer.tools.call_formats import tool_format_for
from producer.tools.tool import make_schema
from producer.tools.tool_episode import ToolEpisode, ToolHost
from producer.tools.toolbox import Toolbox, make_toolbox

# Qwen's form, with an end of turn that the tokenizer has.
TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CALL = '\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
QUESTION = ({"role": "user", "content": "6 * 7?"},)


class Broken:
    """A tool whose server is gone."""

    schema = make_schema("broken", "Break.")

    async def call(self, arguments: dict[str, Any]) -> str:
        raise EpisodeFailure("its server is gone")

    async def close(self) -> None:
        pass


class BrokenKit:
    """Give it to each episode."""

    schemas = (Broken.schema,)

    def open(self) -> list[Broken]:
        return [Broken()]

    def close(self) -> None:
        pass


class Scripted:
    """Answers in the place of an engine's, in order for each episode."""

    temperature = 1.0
    sampling = SamplingParams()

    def __init__(self, tokenizer: Any, answers: Mapping[int, Sequence[str]]) -> None:
        self._tokenizer = tokenizer
        self._answers = {episode: list(texts) for episode, texts in answers.items()}
        self.contexts: dict[int, list[str]] = {episode: [] for episode in answers}
        self.cut = asyncio.Event()

    async def __call__(self, token_ids, *, num_samples=1, episode=None, sampling=None):
        self.contexts[episode].append(self._tokenizer.decode(list(token_ids)))
        text = self._answers[episode].pop(0)
        ids = np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
        is_whole = not text.endswith("...")
        if is_whole:
            ids = np.append(ids, np.int32(self._tokenizer.eos_token_id))
        return (
            Completion(
                token_ids=ids,
                logprobs=np.full(len(ids), -1.0, dtype=np.float32),
                policy_versions=np.zeros(len(ids), dtype=np.int32),
                finish_reason="stop" if is_whole else "length",
                text=text,
            ),
        )

    def end_episode(self, episode: int) -> None:
        """Nothing is open."""


Play = Callable[..., tuple[Rollout, Scripted]]


@pytest.fixture
def play(tokenizer: Any) -> Play:
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATE

    def played(*answers: Sequence[str], max_turns: int = 8, toolbox: Toolbox | None = None) -> tuple[Rollout, Scripted]:
        toolbox = toolbox or make_toolbox(EnvironmentConfig(tools=["calculator"]), is_isolated=True)
        template = ChatTemplate(own, tools=toolbox.schemas)
        prompt = Prompt(uid="p", token_ids=template.prompt(QUESTION), ground_truth="42", messages=QUESTION)

        def make() -> ToolEpisode:
            return ToolEpisode(toolbox, tool_format_for(own), own)

        limits = EpisodeLimits(max_turns=max_turns, max_tokens=4000, timeout_s=20.0)
        environment = EpisodeEnvironment(
            make, template, limits, correct_from={}, host=ToolHost(make, toolbox, timeout_s=20.0)
        )
        generate = Scripted(own, dict(enumerate(answers)))
        try:
            return asyncio.run(environment.run(prompt, generate, group_size=len(answers))), generate
        finally:
            environment.close()

    return played


def test_a_call_is_answered_and_an_answer_without_one_is_the_last(play: Play) -> None:
    rollout, generate = play([CALL, "It is \\boxed{42}."])
    (trajectory,) = rollout.trajectories
    assert trajectory.text == "It is \\boxed{42}."
    assert (rollout.scores, trajectory.rewards) == ({}, ())  # it is for -rt to score it
    first, second = generate.contexts[0]
    assert first.startswith('tools:{"type": "function", "function": {"name": "calculator"')
    assert second == f"{first}{CALL}<|endoftext|>\ntool:42<|endoftext|>\nassistant:"
    answered = sum(turn.end - turn.start for turn in trajectory.turns)
    assert len(trajectory.turns) == 2
    assert trajectory.num_loss_tokens == answered  # no token of an observation


def test_the_record_names_the_tools_and_their_time(play: Play) -> None:
    rollout, _ = play([CALL + CALL, "42"])
    (info,) = [turn["info"] for turn in rollout.records[0]["turns"] if "info" in turn]
    assert [(tool["name"], tool["is_error"]) for tool in info["tools"]] == [("calculator", False)] * 2
    assert info["unreadable_calls"] == 0


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (CALL.replace("6 * 7", "1 / 0"), "tool:Error: division by zero<|endoftext|>"),
        (CALL.replace("calculator", "abacus"), "tool:Error: there is no tool abacus; the tools are calculator<|endof"),
        (
            "<tool_call>{",
            "user:Error: a tool call could not be read: the JSON is not complete\nThe tools are calculator.",
        ),
        (CALL + "\n<tool_call>\n[]\n</tool_call>", "tool:42\nError: a tool call could not be read: a call must be an"),
    ],
)
def test_what_is_wrong_with_a_call_is_read_by_the_policy_which_goes_on(play: Play, answer: str, read: str) -> None:
    rollout, generate = play([answer, "done"])
    assert read in generate.contexts[0][1]
    assert rollout.trajectories[-1].text == "done"
    assert rollout.scores == {}


def test_an_answer_that_is_cut_is_the_last_even_if_it_holds_a_call(play: Play) -> None:
    rollout, generate = play([f"{CALL}\nand then..."])
    assert len(generate.contexts[0]) == 1
    assert rollout.trajectories[0].finish_reason == "length"


def test_turns_end_an_episode_that_goes_on_calling(play: Play) -> None:
    rollout, _ = play([CALL] * 3, max_turns=3)
    assert [len(trajectory.turns) for trajectory in rollout.trajectories] == [3]
    assert rollout.trajectories[0].finish_reason == "length"


def test_a_broken_tool_makes_its_sample_invalid_and_leaves_the_others(play: Play) -> None:
    broken = CALL.replace("calculator", "broken").replace('"expression": "6 * 7"', "")
    rollout, _ = play([broken], ["42"], toolbox=Toolbox([BrokenKit()], timeout_s=5.0))
    assert {number: score.verdict for number, score in rollout.scores.items()} == {0: "invalid"}
    assert "the tool broken is broken: its server is gone" in rollout.scores[0].detail
    assert len(rollout.trajectories) == 2
