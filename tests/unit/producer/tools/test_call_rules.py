"""Test calls that a policy may sample and its own chat template refuses: the policy reads an error, and goes on."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from coati_rl.config.cli import parse
from coati_rl.types import Prompt
from producer.environments.chat import ChatTemplate
from producer.environments.environment import Rollout
from producer.made_environment import make_environment
from producer.tools.call_formats.answer import ParsedAnswer, ToolCall, with_plain_ids
from producer.tools.call_rules import CallRules, call_rules
from tests.unit.producer.chat_families import TOOL, family_tokenizer
from tests.unit.producer.tools.test_tool_episode import QUESTION, Scripted

LLAMA = '{"name": "calculator", "parameters": {"expression": "6 * 7"}}'
MISTRAL = '[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "6 * 7"}, "id": "ID"}]'

Play = Callable[..., tuple[Rollout, list[list[str]]]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """(family of models, answers of each episode) -> the group, and the contexts of each episode."""

    def played(family: str, *answers: Sequence[str]) -> tuple[Rollout, list[list[str]]]:
        tokenizer = family_tokenizer(family)
        tokenizer.save_pretrained(tmp_path)
        config, _ = parse(["--tools", "calculator", "-m", str(tmp_path), "-mpt", "1000", "-mnt", "2000"])
        environment = make_environment(config)
        assert environment is not None
        generate = Scripted(tokenizer, dict(enumerate(answers)))
        prompt = Prompt(
            uid="p", token_ids=ChatTemplate(tokenizer).prompt(QUESTION), ground_truth="42", messages=QUESTION
        )
        try:
            rollout = asyncio.run(environment.run(prompt, generate, group_size=len(answers)))
        finally:
            environment.close()
        return rollout, [*generate.contexts.values()]

    return played


@pytest.mark.parametrize(
    ("family", "rules"),
    [
        ("qwen3", CallRules(takes_several=True, takes_ids=True)),
        ("glm4moe", CallRules(takes_several=True, takes_ids=True)),
        ("llama3_2", CallRules(takes_several=False, takes_ids=True)),
        ("mistral_v3", CallRules(takes_several=True, takes_ids=False)),
        ("mistral_v7", CallRules(takes_several=True, takes_ids=False)),
    ],
)
def test_a_template_is_asked_which_calls_it_writes(family: str, rules: CallRules) -> None:
    assert call_rules(ChatTemplate(family_tokenizer(family), tools=[TOOL])) == rules


def test_of_two_calls_that_the_template_refuses_the_first_is_run_and_the_policy_reads_that_the_other_was_not(
    play: Play,
) -> None:
    rollout, (one, two) = play("llama3_2", [LLAMA, "42"], [f"{LLAMA}; {LLAMA}", "42"])
    assert rollout.scores == {}, "-rt is to score both"
    assert [len(one), len(two)] == [2, 2]
    said = "42\\nError: a tool call could not be read: an answer may hold one call; of these 2, only the first was run"
    assert said in two[1]
    assert "Error" not in one[1]


@pytest.mark.parametrize("call_id", ["1", "call_123", "abcd-fghi"])
def test_an_id_that_the_template_refuses_is_replaced_and_the_policy_goes_on(play: Play, call_id: str) -> None:
    rollout, (refused, taken) = play(
        "mistral_v3", [MISTRAL.replace("ID", call_id), "42"], [MISTRAL.replace("ID", "abcdefghi"), "42"]
    )
    assert rollout.scores == {}
    assert [len(refused), len(taken)] == [2, 2]
    assert call_id not in refused[1].rpartition("[TOOL_RESULTS]")[2]
    assert "abcdefghi" in taken[1].rpartition("[TOOL_RESULTS]")[2], "as the policy has written it"


def test_ids_that_are_replaced_are_nine_letters_and_digits_and_differ() -> None:
    calls = [ToolCall(name="a", arguments={}, id=call_id) for call_id in ("1", "call_1", "abcdefghi")]
    first, second, kept = [call.id for call in with_plain_ids(ParsedAnswer(content="", calls=(*calls,)), turn=0).calls]
    assert [len(first), len(second), kept] == [9, 9, "abcdefghi"]
    assert f"{first}{second}".isalnum()
    assert first != second
