"""Streams and disconnects, over real sockets: when text arrives, and what is left of a client that has gone."""

import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.unit.gateway.served_episodes import OpenEpisode, Served, served

USER = {"role": "user", "content": "Hello"}
TEXT = " It is forty two, and nothing else."


@pytest.fixture
def gateway() -> Iterator[Served]:
    with served(lambda prompt, seed: TEXT) as gateway:
        yield gateway


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def hold(gateway: Served, num_tokens: int) -> None:
    gateway.core.gate.clear()
    gateway.core.hold_after = num_tokens


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_the_first_chunks_arrive_before_the_last_token_is_sampled(gateway, path) -> None:
    episode = gateway.open()
    hold(gateway, 6)
    body = {"messages": [USER], "prompt": "Hello", "stream": True}
    del body["prompt" if path.startswith("chat") else "messages"]
    with episode.client.stream("POST", path, json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        text, lines = "", reply.iter_lines()
        while len(text) < 4:  # the engine waits, with 6 tokens said
            line = next(lines)
            if line:
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice["delta"].get("content", "") if path.startswith("chat") else choice["text"]
        assert TEXT.startswith(text) and text != TEXT
        assert episode.conversation.last is None
        gateway.core.gate.set()
        assert "[DONE]" in [line.removeprefix("data: ") for line in lines]
    assert len(episode.conversation.turns) == 1


def request_bytes(episode: OpenEpisode, **more) -> bytes:
    body = json.dumps({"messages": [USER], **more}).encode()
    path = episode.url.partition("//")[2].partition("/")[2]
    head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Authorization: Bearer {episode.registered.token}\r\n\r\n".encode() + body


def connect(episode: OpenEpisode) -> socket.socket:
    host, _, port = episode.url.partition("//")[2].partition("/")[0].partition(":")
    return socket.create_connection((host, int(port)), timeout=10)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_leaves_no_request_and_no_token_in_a_loss(gateway, stream) -> None:
    episode = gateway.open()
    hold(gateway, 6)
    with connect(episode) as client:
        client.sendall(request_bytes(episode, stream=stream))
        wait_for(lambda: gateway.core.running)
        if stream:
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
    wait_for(lambda: gateway.core.aborted)
    gateway.core.gate.set()
    assert not gateway.core.running and len(gateway.core.aborted) == 1
    assert episode.conversation.last is None
    (unanswered,) = episode.trajectories
    assert unanswered.num_loss_tokens == 0
    episode.chat(USER)  # the episode goes on
    assert [len(each.turns) for each in episode.trajectories] == [1]


def test_an_episode_that_ends_in_mid_stream_ends_it_with_an_error(gateway) -> None:
    episode = gateway.open()
    hold(gateway, 6)
    with episode.client.stream("POST", "chat/completions", json={"messages": [USER], "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        gateway.end(episode)
        told = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    gateway.core.gate.set()
    assert told[-1]["error"]["code"] == "episode_ended"
    assert episode.conversation.last is None


def test_what_is_refused_before_the_first_token_has_a_status_of_its_own(gateway) -> None:
    reply = gateway.open().post("chat/completions", {"messages": [USER], "stream": True, "max_tokens": -1})
    assert reply.status_code == 400
    gateway.core.max_model_len = 4
    assert gateway.open().post("chat/completions", {"messages": [USER], "stream": True}).status_code == 400


def test_the_gateway_listens_on_loopback_alone(gateway) -> None:
    assert gateway.server.url.startswith("http://127.0.0.1:")
    assert gateway.server._listener.getsockname()[0] == "127.0.0.1"
