"""Test what of an episode is trained: bridges, forks, branches, appended text and tokens, clients that are found."""

from dataclasses import replace

import numpy as np
import pytest

from coati_rl.errors import RolloutError
from coati_rl.types import SharedPrefix, TokenReward
from producer.environments.chat import ChatTemplate, TemplateError
from producer.environments.recorder import ConversationTree
from tests.unit.producer.chat_families import completion, family_tokenizer
from tests.unit.producer.talk import QUESTION, Talk, said

NEXT = {"role": "user", "content": "N"}
START = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
BRIDGE = "\n<|im_start|>user\nN<|im_end|>\n<|im_start|>assistant\n"


def test_a_turn_is_bridged_and_its_end_is_masked_where_it_was_cut_off():
    talk = Talk()
    talk.answer("one<|im_end|>")
    talk.answer("two", context=talk.tree.extend(talk.node, [NEXT]), finish_reason="length")
    talk.answer("three<|im_end|>", context=talk.tree.extend(talk.node, [NEXT]))
    assert talk.pieces() == [f"{START}|[one<|im_end|>]{BRIDGE}[two]<|im_end|>{BRIDGE}[three<|im_end|>]"]
    (trajectory,) = talk.tree.trajectories()
    assert [turn.finish_reason for turn in trajectory.turns] == ["stop", "length", "stop"]
    assert trajectory.text == "three"
    assert set(trajectory.temperature) == {0.5}
    assert trajectory.num_loss_tokens == int(trajectory.loss_mask.sum())


def test_what_was_sampled_stays_as_it_was_where_the_tokenizer_would_write_it_otherwise():
    talk = Talk()
    ids = [token for letter in "What is the sum" for token in talk.template.encode(letter)]
    assert len(ids) > len(talk.template.encode("What is the sum"))
    message = said("What is the sum")
    talk.node = talk.tree.add(talk.tree.extend(talk.node), completion(ids), temperature=1.0, message=message)
    talk.answer("two", context=talk.tree.extend(talk.node, [NEXT]))
    (trajectory,) = talk.tree.trajectories()
    assert trajectory.token_ids[len(talk.prompt) :][: len(ids)].tolist() == ids


def test_thinking_that_the_template_drops_makes_a_fork_and_each_token_is_in_one_loss():
    talk = Talk()
    talk.answer("<think>\na\n</think>\n\none<|im_end|>")
    forked = talk.tree.extend(talk.node, [NEXT])
    assert forked.is_fork
    talk.answer("two<|im_end|>", context=forked)
    talk.answer("three<|im_end|>", context=talk.tree.extend(talk.node, [NEXT]))
    assert talk.pieces() == [
        f"{START}|[<think>\na\n</think>\n\none<|im_end|>]",
        f"{START}|one<|im_end|>{BRIDGE}[two<|im_end|>]{BRIDGE}[three<|im_end|>]",
    ]


def test_answers_that_the_template_trims_make_a_fork_that_shares_all_before_the_change():
    talk = Talk("llama3")
    talk.answer("one <|eot_id|>")
    talk.answer("two<|eot_id|>", context=talk.tree.extend(talk.node, [NEXT]))
    opening = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>"
    assistant, user = (f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("assistant", "user"))
    assert talk.pieces() == [
        f"{opening}{assistant}|[one <|eot_id|>]",
        f"{opening}{assistant}one|<|eot_id|>{user}N<|eot_id|>{assistant}[two<|eot_id|>]",
    ]
    assert talk.tree.trajectories()[1].prefix.parent == 0


def test_text_and_tokens_are_appended_as_they_are_and_the_answer_goes_on():
    talk = Talk()
    talk.answer("<search>x</search>", finish_reason="stop")
    talk.answer(" so one", context=talk.tree.extend(talk.node, "<result>y</result>"), finish_reason="length")
    ids = np.array(talk.template.encode(" 4"))
    talk.answer(" or two", context=talk.tree.extend(talk.node, ids), finish_reason="length")
    talk.answer(" or three<|im_end|>", context=talk.tree.extend(talk.node, None))
    whole = "<search>x</search><result>y</result> so one 4 or two or three"
    assert talk.node.messages == (QUESTION, said(whole))
    talk.answer("end", context=talk.tree.extend(talk.node, [NEXT]))
    assert talk.pieces() == [
        f"{START}|[<search>x</search>]<result>y</result>[ so one] 4[ or two or three<|im_end|>]{BRIDGE}[end]"
    ]


def test_two_answers_in_one_context_share_it_and_each_is_in_one_loss():
    talk = Talk()
    first = talk.answer("one<|im_end|>")
    context = talk.tree.extend(first, [NEXT])
    talk.answer("two<|im_end|>", context=context)
    talk.answer("or three<|im_end|>", context=context)
    shared = f"{START}one<|im_end|>{BRIDGE}"
    assert talk.pieces() == [
        f"{START}|[one<|im_end|>]{BRIDGE}[two<|im_end|>]",
        f"{shared}|[or three<|im_end|>]",
    ]
    prefix = talk.tree.trajectories()[1].prefix
    assert prefix == SharedPrefix(num_tokens=len(context.token_ids), parent=0)


def test_two_equal_answers_in_one_context_are_both_trained():
    talk = Talk()
    context = talk.tree.find([QUESTION])
    talk.answer("one<|im_end|>", context=context)
    talk.answer("one<|im_end|>", context=context)
    assert talk.pieces() == [f"{START}|[one<|im_end|>]"] * 2


def test_what_an_answer_shares_with_the_prompt_and_as_much_with_earlier_ones_is_the_prompts():
    talk = Talk()
    prompt = talk.tree.extend(talk.node)
    for text in ("one<|im_end|>", "two<|im_end|>"):
        talk.answer(text, context=prompt)
    for text in ("three<|im_end|>", "four<|im_end|>"):  # of two that share as much, the first is the parent
        elsewhere = replace(talk.tree.extend(talk.node, [NEXT]), token_ids=(*prompt.token_ids, 7, 8), is_fork=True)
        talk.answer(text, context=elsewhere)
    talk.answer("five<|im_end|>", context=elsewhere)
    assert [each.prefix for each in talk.tree.trajectories()] == [
        SharedPrefix(num_tokens=len(talk.prompt)),
        SharedPrefix(num_tokens=len(talk.prompt)),
        SharedPrefix(num_tokens=len(talk.prompt)),
        SharedPrefix(num_tokens=len(talk.prompt) + 2, parent=2),
        SharedPrefix(num_tokens=len(talk.prompt) + 2, parent=2),
    ]


def test_a_client_is_found_by_its_messages_whatever_else_it_sends():
    talk = Talk()
    function = {"name": "add", "arguments": '{"a":1, "b":2}'}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    sampled = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    first = talk.answer(sampled, context=talk.tree.find([QUESTION]), message=call)
    rewritten = {"id": "c1", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
    again = {"role": "assistant", "tool_calls": [rewritten], "refusal": None}
    context = talk.tree.find([QUESTION, again, {"role": "tool", "tool_call_id": "c1", "content": "3"}])
    assert (context.node, context.is_fork) == (first, False)
    assert talk.template.decode(context.token_ids) == (
        f"{START}{sampled}\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("change", [{"id": "c2"}, {"function": {"name": "sub", "arguments": {"a": 1}}}])
def test_a_call_with_another_id_or_name_is_another_message(change):
    talk = Talk()
    call = {"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
    talk.answer("call", message={"role": "assistant", "content": "", "tool_calls": [call]})
    changed = {"role": "assistant", "content": "", "tool_calls": [call | change]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    assert talk.tree.find([QUESTION, changed, result]).node.completion is None
    assert talk.tree.find([QUESTION, talk.node.messages[-1], result]).node is talk.node


def test_an_answer_that_the_client_has_changed_is_masked_in_a_branch_and_trained_where_it_was_sampled():
    talk = Talk()
    talk.answer("one<|im_end|>", context=talk.tree.find([QUESTION]))
    talk.answer("two <|im_end|>", context=talk.tree.find([QUESTION, said("one"), NEXT]))
    context = talk.tree.find([QUESTION, said("one"), NEXT, said("two"), NEXT])
    talk.answer("three<|im_end|>", context=context)
    assert talk.pieces() == [
        f"{START}|[one<|im_end|>]{BRIDGE}[two <|im_end|>]",
        f"{START}one<|im_end|>{BRIDGE}two|<|im_end|>{BRIDGE}[three<|im_end|>]",
    ]


def test_a_client_that_begins_anew_shares_what_it_can_with_the_prompt():
    talk = Talk()
    talk.answer("one<|im_end|>", context=talk.tree.find([QUESTION]))
    other = talk.tree.find([{"role": "system", "content": "S"}, QUESTION])
    assert (other.node, other.is_fork) == (None, True)
    talk.answer("two<|im_end|>", context=other)
    assert talk.pieces() == [
        f"{START}|[one<|im_end|>]",
        f"<|im_start|>|system\nS<|im_end|>\n{START}[two<|im_end|>]",
    ]


def test_other_tools_make_a_fork():
    talk = Talk()
    talk.answer("one<|im_end|>", context=talk.tree.find([QUESTION]))
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    context = talk.tree.find([QUESTION, said("one"), NEXT], tools=[tool])
    assert (context.node, context.is_fork) == (talk.node, True)
    assert "<tools>" in context.text


def test_rewards_are_at_the_last_token_of_their_turn_in_the_trajectory_that_trains_it():
    talk = Talk()
    first = talk.answer("<think>\n\n</think>\n\none<|im_end|>")
    talk.tree.add_reward(first, "turn", 0.25)
    second = talk.answer("two<|im_end|>", context=talk.tree.extend(first, [NEXT]))
    talk.tree.add_reward(second, "turn", 0.5)
    talk.tree.add_reward(second, "end", 1.0)
    one, two = talk.tree.trajectories()
    assert one.rewards == (TokenReward(position=len(one.token_ids) - 1, name="turn", value=0.25),)
    end = len(two.token_ids) - 1
    assert two.rewards == (
        TokenReward(position=end, name="turn", value=0.5),
        TokenReward(position=end, name="end", value=1.0),
    )
    with pytest.raises(ValueError, match="given to an answer"):
        talk.tree.add_reward(talk.tree.start((1, 2)), "turn", 1.0)


def test_an_episode_that_begins_elsewhere_shares_with_the_prompt_what_both_have():
    template = ChatTemplate(family_tokenizer("qwen3"))
    prompt = template.prompt([QUESTION])
    talk = Talk(prompt_ids=prompt, opening=[{"role": "user", "content": "Other"}])
    talk.answer("one<|im_end|>")
    talk.prompt = prompt
    assert talk.pieces() == [START.replace("Q", "|Other") + "[one<|im_end|>]"]


def test_an_episode_without_an_answer_has_an_empty_turn_that_was_aborted():
    talk = Talk()
    assert talk.pieces() == [f"{START}|"]
    (trajectory,) = talk.tree.trajectories()
    assert (trajectory.finish_reason, trajectory.num_loss_tokens, trajectory.text) == ("abort", 0, "")


def test_an_answer_without_tokens_is_a_turn_without_tokens():
    talk = Talk()
    talk.answer("", finish_reason="length")
    talk.tree.add_reward(talk.node, "turn", 1.0)
    talk.answer("two<|im_end|>", context=talk.tree.extend(talk.node, [NEXT]))
    assert talk.pieces() == [f"{START}|<|im_end|>{BRIDGE}[two<|im_end|>]"]
    (trajectory,) = talk.tree.trajectories()
    assert (trajectory.turns[0].start, trajectory.turns[0].end) == (len(talk.prompt), len(talk.prompt))
    assert trajectory.rewards[0].position == len(talk.prompt)


def test_a_prompt_of_text_takes_no_messages():
    talk = Talk()
    root = talk.tree.start(talk.template.encode("Once upon"), ())
    node = talk.answer("one", context=talk.tree.extend(root, " a time"))
    assert node.messages == ()
    with pytest.raises(RolloutError, match="the prompt is text; return text or token ids"):
        talk.tree.extend(node, [NEXT])


def test_a_model_without_a_template_has_prompts_of_text():
    tokenizer = family_tokenizer("qwen3")
    bare = ChatTemplate(type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer))
    tree = ConversationTree(bare, episode=0)
    root = tree.start(bare.encode("Question: Q"), [QUESTION])
    assert (root.text, root.messages) == ("Question: Q", ())
    with pytest.raises(TemplateError):
        tree.find([QUESTION])


@pytest.mark.parametrize("observation", [[1, 10**6], [-1], [1.5], [None], [QUESTION, 3]])
def test_an_observation_that_is_none_is_refused(observation):
    talk = Talk()
    talk.answer("one")
    with pytest.raises(RolloutError, match="neither text nor a list of messages nor of the vocabulary's token ids"):
        talk.tree.extend(talk.node, observation)


def test_what_is_said_in_each_trajectory_is_read_as_messages():
    talk = Talk()
    talk.answer("<think>\na\n</think>\n\none<|im_end|>")
    talk.answer("two<|im_end|>", context=talk.tree.extend(talk.node, [NEXT]))  # a fork
    talk.answer("three<|im_end|>", context=talk.tree.extend(talk.node, [NEXT]))
    thought = said("<think>\na\n</think>\n\none")
    assert talk.tree.conversations() == [
        [QUESTION, thought],
        [QUESTION, thought, NEXT, said("two"), NEXT, said("three")],
    ]
    assert len(talk.tree.trajectories()) == 2


def test_what_is_said_after_a_prompt_of_text_is_the_text_of_all_tokens():
    talk = Talk()
    tree = ConversationTree(talk.template, episode=0)
    node = tree.start(talk.template.encode("Once"))
    context = tree.extend(node, " upon")
    sampled = talk.template.encode(" a time")
    node = tree.add(context, completion(sampled), temperature=1.0, message=said(" a time"))
    assert tree.conversations() == ["Once upon a time"]
    assert ConversationTree(talk.template, episode=0, prompt_ids=(1, 2)).conversations() == []


def test_what_json_cannot_hold_of_a_message_is_left_out_of_what_is_read():
    talk = Talk()
    talk.answer("one<|im_end|>")
    odd = {**NEXT, "image": object()}
    talk.answer("two<|im_end|>", context=talk.tree.extend(talk.node, [odd]))
    assert talk.tree.conversations() == [[QUESTION, said("one"), NEXT, said("two")]]
