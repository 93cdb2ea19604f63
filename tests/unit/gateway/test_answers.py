"""Answers of the gateway: chat and raw text, several samples, limits, log-probabilities, tools, streams."""

import json
from collections.abc import Iterator

import pytest

from tests.unit.gateway.served_episodes import OpenEpisode, Served, served
from tests.unit.gateway.speaking_engine import logprob

USER = {"role": "user", "content": "What is 17 and 25?"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add",  "arguments": {"a": 17, "b":25}}\n</tool_call>'


def speech(prompt: str, seed: int) -> str:
    """Calls the tool if there is one and it has not answered; else says something that depends on the seed."""
    if "<tools>" in prompt and "<tool_response>" not in prompt:
        return f"Let me add.\n{CALL}"
    return f" Übung {seed % 1000} is 42.\n日本語 END, then more"


@pytest.fixture(scope="module")
def gateway() -> Iterator[Served]:
    with served(speech) as gateway:
        yield gateway


@pytest.fixture
def episode(gateway: Served) -> OpenEpisode:
    return gateway.open()


def sampled(episode: OpenEpisode) -> list[list[int]]:
    """The tokens in the loss of each trajectory."""
    return [each.token_ids[each.loss_mask].tolist() for each in episode.trajectories]


def events(reply) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_answer_is_a_chat_completion_and_its_tokens_are_recorded_as_sampled(gateway, episode) -> None:
    body = episode.chat(USER, seed=7)
    (choice,) = body["choices"]
    (trajectory,) = episode.trajectories
    request = gateway.core.requests[-1]
    assert body["object"] == "chat.completion" and body["model"] == "any" and body["id"].startswith("chatcmpl-")
    assert choice["message"] == {
        "role": "assistant",
        "content": speech("", request.sampling.seed),
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop"
    ids = trajectory.token_ids[trajectory.loss_mask].tolist()
    assert ids[-1] == gateway.tokenizer.eos_token_id
    assert gateway.tokenizer.decode(ids[:-1]) == choice["message"]["content"]
    assert trajectory.token_ids[~trajectory.loss_mask].tolist() == list(request.token_ids)
    assert trajectory.logprobs.tolist() == pytest.approx([logprob(each) for each in ids])
    assert body["usage"] == {
        "prompt_tokens": len(request.token_ids),
        "completion_tokens": len(ids),
        "total_tokens": len(request.token_ids) + len(ids),
    }


def test_a_seed_gives_the_same_answer_again_and_none_gives_others(episode) -> None:
    answers = [
        episode.chat(USER, **more)["choices"][0]["message"]["content"] for more in ({"seed": 3}, {"seed": 3}, {})
    ]
    assert answers[0] == answers[1] != answers[2]


def test_the_temperature_of_each_token_is_recorded_as_it_was_sampled_at(gateway, episode) -> None:
    first = episode.chat(USER, temperature=0.5)["choices"][0]["message"]
    episode.chat(USER, first, USER)
    assert [request.sampling.temperature for request in gateway.core.requests[-2:]] == [0.5, 0.8]
    recorded = episode.trajectories[-1].temperature
    assert (recorded[0], recorded[-1]) == pytest.approx((0.5, 0.8))


def test_max_tokens_cuts_an_answer_and_cannot_exceed_the_runs(gateway, episode) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        (choice,) = episode.chat(USER, **{name: 3})["choices"]
        assert choice["finish_reason"] == "length"
        assert len(gateway.tokenizer(choice["message"]["content"])["input_ids"]) <= 3
    episode.chat(USER, max_tokens=100_000)
    assert gateway.core.requests[-1].sampling.max_new_tokens == 200


def test_an_answer_ends_before_a_stop_string_whose_tokens_are_recorded(gateway, episode) -> None:
    (choice,) = episode.chat(USER, stop=["END", "never"])["choices"]
    assert choice["message"]["content"].endswith("日本語 ") and choice["finish_reason"] == "stop"
    assert gateway.tokenizer.decode(sampled(episode)[0]).endswith("日本語 END")


def test_several_samples_are_branches_of_one_context(gateway, episode) -> None:
    choices = episode.chat(USER, n=3)["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert [choice["index"] for choice in choices] == [0, 1, 2] and len(set(texts)) == 3
    assert [gateway.tokenizer.decode(each[:-1]) for each in sampled(episode)] == texts
    follow = {"role": "user", "content": "And then?"}
    episode.chat(USER, choices[1]["message"], follow)
    *others, last = sampled(episode)
    assert len(others) == 2 and gateway.tokenizer.decode(last).startswith(texts[1]), "the second branch goes on"


def test_logprobs_are_those_of_the_sampled_tokens(gateway, episode) -> None:
    (choice,) = episode.chat(USER, logprobs=True)["choices"]
    ids = sampled(episode)[0]
    told = choice["logprobs"]["content"]
    assert [each["logprob"] for each in told] == pytest.approx([logprob(token) for token in ids], abs=1e-6)
    for each, token in zip(told, ids, strict=True):
        assert each["token"] == gateway.language.decode([token])
        assert each["bytes"] == (None if "\ufffd" in each["token"] else list(each["token"].encode()))


def test_raw_text_goes_on_from_its_own_answer_without_another_tokenisation(gateway, episode) -> None:
    first = episode.post("completions", {"prompt": "Once", "max_tokens": 5, "logprobs": 0}).json()
    (choice,) = first["choices"]
    assert first["object"] == "text_completion" and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["text_offset"]) == 5
    second = episode.post("completions", {"prompt": f"Once{choice['text']} and so", "max_tokens": 5}).json()
    (trajectory,) = episode.trajectories
    assert len(trajectory.turns) == 2 and len(second["choices"]) == 1
    assert gateway.tokenizer.decode(trajectory.token_ids[: trajectory.turns[1].start]).endswith("and so")


def test_raw_text_that_leaves_the_end_token_out_is_a_fork_that_shares_all_before_it(gateway, episode) -> None:
    first = episode.post("completions", {"prompt": "Once"}).json()["choices"][0]
    assert first["finish_reason"] == "stop"
    episode.post("completions", {"prompt": f"Once{first['text']} and so", "max_tokens": 5})
    one, two = episode.trajectories
    assert one.token_ids[-1] == gateway.tokenizer.eos_token_id
    assert two.prefix.parent == 0 and two.prefix.num_tokens == len(one.token_ids) - 1
    assert two.num_loss_tokens == 5


def test_a_prompt_may_be_tokens(episode) -> None:
    first = episode.post("completions", {"prompt": [5, 6, 7], "max_tokens": 4}).json()
    assert first["usage"]["prompt_tokens"] == 3
    ids = episode.trajectories[0].token_ids.tolist()
    episode.post("completions", {"prompt": [*ids, 9], "max_tokens": 4})
    assert [len(each.turns) for each in episode.trajectories] == [2]


def test_a_prompt_may_be_a_list_of_one(gateway, episode) -> None:
    for prompt in ("Once", [5, 6, 7]):
        for written in (prompt, [prompt]):
            assert episode.post("completions", {"prompt": written, "max_tokens": 2}).status_code == 200
        first, second = (request.token_ids for request in gateway.core.requests[-2:])
        assert first == second


def test_a_call_without_arguments_may_be_sent_back_with_an_empty_text(episode) -> None:
    function = {"name": "now", "arguments": ""}
    calls = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "1", "content": "noon"}
    assert episode.chat(USER, calls, result)["choices"][0]["finish_reason"] == "stop"


def test_arguments_that_are_written_as_texts_have_the_types_of_their_tool() -> None:
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in (("a", 17), ("b", 25)))
    call = f"<tool_call>\n<function=add>\n{written}</function>\n</tool_call>"
    with served(lambda prompt, seed: "42." if "<tool_response>" in prompt else call, family="qwen3_5_think") as gateway:
        episode = gateway.open()
        message = episode.chat(USER, tools=[ADD])["choices"][0]["message"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 17, "b": 25}
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
        episode.chat(USER, message, result, tools=[ADD])
        assert sum(len(each.turns) for each in episode.trajectories) == 2


def test_calls_of_tools_are_parsed_and_found_again_however_the_client_writes_them(gateway, episode) -> None:
    body = episode.chat(USER, tools=[ADD])
    (choice,) = body["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 17, "b": 25}
    sent_back = {"role": "assistant", "content": choice["message"]["content"], "tool_calls": [call], "audio": None}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    last = episode.chat(USER, sent_back, result, tools=[ADD])["choices"][0]
    assert last["finish_reason"] == "stop"
    forks = episode.trajectories
    assert sum(len(each.turns) for each in forks) == 2, "each answer is in the loss of one trajectory"
    assert gateway.tokenizer.decode(sampled(episode)[0]).endswith(f"{CALL}<|im_end|>")


def test_without_a_choice_of_tools_their_calls_are_text(episode) -> None:
    (choice,) = episode.chat(USER, tools=[ADD], tool_choice="none")["choices"]
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("more", [{}, {"stop": "END"}, {"n": 2}, {"tools": [ADD]}, {"logprobs": True}])
def test_a_stream_adds_up_to_the_answer_without_it(episode, more) -> None:
    whole = episode.chat(USER, seed=11, **more)
    chunks = events(
        episode.post(
            "chat/completions",
            {"messages": [USER], "seed": 11, "stream": True, "stream_options": {"include_usage": True}, **more},
        )
    )
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(each["delta"].get("content") or "" for each in own)
        assert text == (choice["message"]["content"] or "")
        calls = [call for each in own for call in each["delta"].get("tool_calls", ())]
        assert [call["function"] for call in calls] == [c["function"] for c in choice["message"].get("tool_calls", ())]
        assert [each["finish_reason"] for each in own][-1] == choice["finish_reason"]
        if "logprobs" in more:
            told = [entry for each in own if each["logprobs"] for entry in each["logprobs"]["content"]]
            assert told == choice["logprobs"]["content"]
    assert len(episode.conversation.turns) == 2 * more.get("n", 1)


def test_a_streamed_raw_text_adds_up_too(episode) -> None:
    whole = episode.post("completions", {"prompt": "Once", "seed": 4}).json()
    chunks = events(episode.post("completions", {"prompt": "Once", "seed": 4, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


def test_the_models_are_one_by_any_name(episode) -> None:
    listed = episode.client.get("models").json()
    assert [each["id"] for each in listed["data"]] == ["policy"]
    assert episode.client.get("models/owner/name").json()["id"] == "owner/name"
