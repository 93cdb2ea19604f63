"""Test that the gateway refuses wrong requests with the right status, and leaves nothing behind."""

import threading
import time
from collections.abc import Iterator

import httpx2 as httpx
import pytest

from coati_rl.types import SamplingParams
from producer.gateway.app import BodyLimits
from tests.unit.gateway.served_episodes import OpenEpisode, Served, served

USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Served]:
    with served(lambda prompt, seed: f"Said by {seed}.", limits=BodyLimits(max_bytes=4096), max_in_flight=3) as gateway:
        yield gateway


@pytest.fixture
def episode(gateway: Served) -> OpenEpisode:
    return gateway.open()


def chat(episode: OpenEpisode, **more) -> httpx.Response:
    return episode.post("chat/completions", {"model": "any", "messages": [USER], **more})


@pytest.mark.parametrize("path", ["chat/completions", "completions", "reward", "models"])
def test_a_wrong_token_is_401_and_the_token_of_another_episode_403(gateway, episode, path) -> None:
    other = gateway.open()

    def status(headers) -> tuple[int, str]:
        method = "GET" if path == "models" else "POST"
        reply = httpx.request(method, f"{episode.url}/{path}", headers=headers, trust_env=False)
        return reply.status_code, reply.json()["error"]["type"]

    assert status({"Authorization": "Bearer wrong"}) == (401, "authentication_error")
    assert status({"Authorization": f"Basic {episode.registered.token}"}) == (401, "authentication_error")
    assert status({}) == (401, "authentication_error")
    assert status({"Authorization": f"Bearer {other.registered.token}"}) == (403, "permission_error")
    assert episode.conversation.last is None and other.conversation.last is None


def test_an_episode_that_does_not_exist_looks_like_any_other_to_a_wrong_token(gateway, episode) -> None:
    url = f"{gateway.server.url}/episodes/none/v1/models"
    replies = [
        httpx.get(url, headers={"Authorization": f"Bearer {token}"}, trust_env=False).status_code
        for token in ("wrong", episode.registered.token)
    ]
    assert replies == [401, 403]
    gateway.end(episode)
    ended = {"Authorization": f"Bearer {episode.registered.token}"}
    assert httpx.get(url, headers=ended, trust_env=False).status_code == 403


def test_a_path_that_does_not_exist_is_404_in_the_same_form(episode) -> None:
    reply = episode.post("embeddings", {"input": "x"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


def test_half_of_a_surrogate_pair_is_refused(episode) -> None:
    body = b'{"model": "any", "messages": [{"role": "user", "content": "\\ud800"}]}'
    headers = {"Authorization": f"Bearer {episode.registered.token}"}
    reply = httpx.post(f"{episode.url}/chat/completions", content=body, headers=headers, trust_env=False)
    assert (reply.status_code, "surrogate pair" in reply.json()["error"]["message"]) == (400, True)
    named = b'{"reward": 1, "name": "\\ud800"}'
    reply = httpx.post(f"{episode.url}/reward", content=named, headers=headers, trust_env=False)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "name")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": ["a"]}}}]},
            "tools[0].function.parameters",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": 0.005}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.5}, "min_p"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"stop": ""}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_the_name_of_its_field(gateway, episode, fields, param) -> None:
    num_requests = len(gateway.core.requests)
    reply = chat(episode, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param.partition("[")[0].partition(".")[0] in error["message"]
    assert len(gateway.core.requests) == num_requests and episode.conversation.last is None


def test_the_runs_own_top_p_and_neutral_values_are_no_reason_to_refuse(episode) -> None:
    neutral = {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0,
        "n": 1,
        "presence_penalty": 0,
        "logit_bias": {},
        "user": "me",
        "stop": None,
    }
    assert chat(episode, **neutral, response_format={"type": "text"}).status_code == 200


def test_an_evaluation_may_be_sampled_in_any_way(gateway) -> None:
    episode = gateway.open(is_trained=False)
    assert chat(episode, temperature=0, top_p=0.5, top_k=5, min_p=0.2).status_code == 200
    sampling = gateway.core.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 5, 0.2)
    error = chat(episode, temperature=0.005).json()["error"]
    assert error["message"] == ("temperature: 0.005 is below 0.01, the lowest that vLLM samples at; use 0.01 or more")


@pytest.mark.parametrize(("body", "status"), [(b"{", 400), (b"[1]", 400), (b" " * 5000, 413)])
def test_a_body_that_is_no_request_is_refused(episode, body, status) -> None:
    reply = episode.client.post("chat/completions", content=body)
    assert reply.status_code == status and "error" in reply.json()


def test_a_body_without_a_length_is_limited_too(episode) -> None:
    pieces = (b" " * 1000 for _ in range(100))
    assert episode.client.post("completions", content=pieces).status_code == 413


def test_a_prompt_that_the_engine_refuses_is_400_with_its_reason(gateway) -> None:
    episode = gateway.open(sampling=SamplingParams(max_new_tokens=4))
    reply = episode.post("completions", {"prompt": [1] * 4096})
    assert reply.status_code == 413
    gateway.core.max_model_len, kept = 8, gateway.core.max_model_len
    try:
        reply = episode.post("completions", {"prompt": [1] * 9})
    finally:
        gateway.core.max_model_len = kept
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded") and "9" in error["message"]
    unknown = episode.post("completions", {"prompt": [10**6]})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [""], [[]], [], [{}]])
def test_several_prompts_and_empty_ones_are_refused(episode, prompt) -> None:
    reply = episode.post("completions", {"prompt": prompt})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


def held(gateway: Served, calls) -> list[threading.Thread]:
    """Calls that wait for the engine, started in threads."""
    gateway.core.gate.clear()
    gateway.core.hold_after = 2
    threads = [threading.Thread(target=call) for call in calls]
    before = len(gateway.core.running)
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while len(gateway.core.running) < before + len(threads):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return threads


def release(gateway: Served, threads) -> None:
    gateway.core.gate.set()
    for thread in threads:
        thread.join(60)
    gateway.core.hold_after = 10**9


def test_more_calls_in_flight_than_allowed_are_429_and_another_episode_is_not_held_up(gateway, episode) -> None:
    statuses: list[int] = []
    threads = held(gateway, [lambda: statuses.append(chat(episode).status_code)] * 3)
    late = chat(episode)
    other = gateway.open()
    more = held(gateway, [lambda: statuses.append(chat(other).status_code)])
    release(gateway, [*threads, *more])
    assert (late.status_code, late.headers["retry-after"]) == (429, "1")
    assert statuses == [200] * 4
    assert chat(episode).status_code == 200


def test_the_end_of_an_episode_ends_its_call_in_flight_and_refuses_the_next_one(gateway, episode) -> None:
    assert chat(episode).status_code == 200
    replies: list[httpx.Response] = []
    threads = held(gateway, [lambda: replies.append(chat(episode))])
    aborted = len(gateway.core.aborted)
    gateway.end(episode)
    for thread in threads:
        thread.join(60)
    release(gateway, threads)
    replies.append(chat(episode))
    assert [reply.status_code for reply in replies] == [503, 503]
    assert [reply.headers["x-should-retry"] for reply in replies] == ["false"] * 2
    assert len(gateway.core.aborted) == aborted + 1
    assert len(episode.conversation.turns) == 1, "what was cut off is in no loss"
    assert httpx.get(f"{episode.url}/models", headers={"Authorization": "Bearer x"}, trust_env=False).status_code == 401


def test_calls_that_may_wait_are_answered_after_those_that_are_sampled() -> None:
    with served(lambda prompt, seed: f"Said by {seed}.", max_in_flight=2, max_waiting=3) as gateway:
        episode, statuses = gateway.open(), list[int]()
        threads = held(gateway, [lambda: statuses.append(chat(episode).status_code)] * 2)
        waiting = [threading.Thread(target=lambda: statuses.append(chat(episode).status_code)) for _ in range(3)]
        for thread in waiting:
            thread.start()
        deadline = time.monotonic() + 60
        while len(episode.registered.session._calls) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert len(gateway.core.running) == 2 and chat(episode).status_code == 429
        release(gateway, [*threads, *waiting])
        assert statuses == [200] * 5 and gateway.core.max_running == 2


def test_a_dead_engine_is_503(tmp_path) -> None:
    with served(lambda prompt, seed: "x") as gateway:
        episode = gateway.open()
        gateway.engine.close()
        reply = chat(episode)
    assert reply.status_code == 503 and "engine" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"reward": "1"},
        {"reward": float("1e12")},
        {"reward": None},
        {"reward": 1, "name": ""},
        {"reward": 1, "step": 2},
        {"reward": 1},
    ],
)
def test_a_reward_that_is_none_or_comes_before_an_answer_is_refused(episode, body) -> None:
    assert episode.post("reward", body).status_code == 400
    assert not episode.tree.trajectories()[0].rewards


def test_rewards_add_up_by_name_at_the_last_answer(gateway, episode) -> None:
    chat(episode)
    assert episode.post("reward", {"reward": 0.5}).json() == {"reward": 0.5, "name": "env"}
    url = episode.url.removesuffix("/v1") + "/reward"
    assert episode.client.post(url, json={"reward": True, "name": "format"}).status_code == 200
    (trajectory,) = episode.trajectories
    last = len(trajectory.token_ids) - 1
    assert [(each.position, each.name, each.value) for each in trajectory.rewards] == [
        (last, "env", 0.5),
        (last, "format", 1.0),
    ]
