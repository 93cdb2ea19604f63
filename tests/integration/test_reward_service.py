"""Test the replies and refusals of the reward service over real HTTP."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from coati_rl import __version__
from tests.integration.reward_service_process import TOKEN, ServiceProcess, own_reward, wait_until

FIVE = {"ground_truth": "5"}


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with ServiceProcess("--max-body-mb", "1", "--max-responses", "8", reward_type="boxed") as running:
        yield running


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    return own_reward(tmp_path_factory.mktemp("own"))


def ask(service: ServiceProcess, responses: list[str], **fields: Any) -> tuple[int, dict[str, str], Any]:
    return service.request("POST", "/score", {"responses": responses, "problem": FIVE, **fields})


def raw(service: ServiceProcess, text: bytes, *, timeout_s: float = 60.0) -> bytes:
    """Send bytes, then read up to the end of the connection."""
    with socket.create_connection(service.address, timeout=timeout_s) as connection:
        connection.sendall(text)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
        return answer


def test_responses_are_scored_in_their_order(service: ServiceProcess) -> None:
    status, headers, reply = ask(service, [r"\boxed{5}", r"\boxed{6}", "no box", r"\boxed{5.0}"])
    assert (status, headers["content-type"]) == (200, "application/json")
    assert [score["verdict"] for score in reply["scores"]] == ["ok", "wrong", "wrong", "ok"]
    assert reply["scores"][0] == {
        "reward": 1.0,
        "answer_correct": True,
        "format_valid": True,
        "verdict": "ok",
        "detail": "5 equals 5",
    }


def test_the_whole_problem_and_the_reward_type_may_be_named(service: ServiceProcess) -> None:
    problem = {"ground_truth": "5", "uid": "x", "messages": [{"role": "user", "content": "2+3?"}], "prompt": "2+3?"}
    body = {"responses": [r"\boxed{5}"], "problem": problem, "reward_type": "boxed"}
    assert service.request("POST", "/score", body)[2]["scores"][0]["verdict"] == "ok"


def test_no_responses_have_no_scores(service: ServiceProcess) -> None:
    assert ask(service, [])[::2] == (200, {"scores": []})


def test_health_needs_no_token(service: ServiceProcess) -> None:
    status, headers, reply = service.request("GET", "/health", token=None)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert reply == {"status": "ok", "reward_type": "boxed", "version": __version__, "num_workers": 1, "queued": 0}


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], TOKEN.upper()])
def test_without_the_token_nothing_is_scored(service: ServiceProcess, token: str | None) -> None:
    status, headers, reply = service.request("POST", "/score", {"responses": [], "problem": FIVE}, token=token)
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert "token" in reply["error"]
    assert TOKEN not in reply["error"]


@pytest.mark.parametrize("header", [b"Basic " + TOKEN.encode(), TOKEN.encode(), b"Bearer", b"Bearer \xff\xfe"])
def test_a_token_in_another_form_is_refused(service: ServiceProcess, header: bytes) -> None:
    request = b"POST /score HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\nAuthorization: %b\r\n\r\n"
    assert raw(service, request % header).startswith(b"HTTP/1.1 401 ")


def test_a_body_is_not_read_before_the_token_is(service: ServiceProcess) -> None:
    head = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n"
    with socket.create_connection(service.address, timeout=60) as connection:
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "body: Invalid JSON"),
        (b"{broken", "body: Invalid JSON"),
        (b"\xff\xfe", "body: Invalid JSON"),
        (b"[" * 100_000, "body: Invalid JSON"),
        (b"[]", "body: "),
        (b"{}", "responses: Field required; problem: Field required"),
        ({"responses": "5", "problem": FIVE}, "responses: "),
        ({"responses": [5], "problem": FIVE}, "responses.0: Input should be a valid string"),
        ({"responses": [None] * 1000, "problem": FIVE}, "responses.0: Input should be a valid string"),
        ({"responses": ["5"]}, "problem: Field required"),
        ({"responses": ["5"], "problem": {}}, "problem.ground_truth: Field required"),
        ({"responses": ["5"], "problem": {"ground_truth": 5}}, "problem.ground_truth: "),
        ({"responses": ["5"], "problem": {"ground_truth": "5", "answer": "5"}}, "problem.answer: Extra inputs"),
        ({"responses": ["5"], "problem": {"ground_truth": "5", "messages": "hi"}}, "problem.messages: "),
        ({"responses": ["5"], "problem": FIVE, "timeout_s": 9}, "timeout_s: Extra inputs are not permitted"),
        ({"responses": ["5"] * 9, "problem": FIVE}, "responses: got 9, at most 8 are allowed"),
        ({"responses": ["5"], "problem": FIVE, "reward_type": "code"}, "this service scores 'boxed', not 'code'"),
    ],
)
def test_a_request_that_is_none_is_refused_with_its_field(service: ServiceProcess, body: Any, complaint: str) -> None:
    status, _, reply = service.request("POST", "/score", body)
    assert status == 422
    assert complaint in reply["error"]
    assert len(reply["error"]) < 500


def test_a_body_that_announces_too_much_is_refused_before_it_is_sent(service: ServiceProcess) -> None:
    head = f"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {2 << 20}\r\n\r\n"
    with socket.create_connection(service.address, timeout=60) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_grows_too_large_is_refused_on_the_way(service: ServiceProcess) -> None:
    head = f"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with socket.create_connection(service.address, timeout=60) as connection:
        connection.sendall(head.encode() + chunk * 17)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_of_the_largest_size_is_taken(service: ServiceProcess) -> None:
    body = json.dumps({"responses": [r"\boxed{5}"], "problem": FIVE}).encode()
    assert service.request("POST", "/score", body + b" " * ((1 << 20) - len(body)))[0] == 200
    assert service.request("POST", "/score", body + b" " * ((1 << 20) - len(body) + 1))[0] == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("GET", "/redoc", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/score", 405),
        ("POST", "/health", 405),
        ("POST", "/score/", 404),
    ],
)
def test_other_addresses_do_not_exist_and_say_so_in_json(
    service: ServiceProcess, method: str, path: str, status: int
) -> None:
    got, headers, reply = service.request(method, path)
    assert (got, headers["content-type"]) == (status, "application/json")
    assert set(reply) == {"error"}


@pytest.mark.full
def test_a_response_that_takes_too_long_and_clients_that_go_away_disturb_nobody(own: str) -> None:
    with ServiceProcess("--timeout-s", "1", reward_type=own) as service:
        scores = ask(service, ["5", "sleep", "6"])[2]["scores"]
        assert [score["verdict"] for score in scores] == ["ok", "invalid", "wrong"]
        body = json.dumps({"responses": ["sleep"], "problem": FIVE}).encode()
        head = (
            f"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        for sent in (head.encode()[:40], head.encode(), head.encode() + body[:10], head.encode() + body):
            with socket.create_connection(service.address, timeout=60) as connection:
                connection.sendall(sent)
                if sent.endswith(body):
                    wait_until(lambda: service.health()["queued"] == 1)
        assert ask(service, ["5"])[2]["scores"][0]["verdict"] == "ok"
        wait_until(lambda: service.health()["queued"] == 0)  # the complete request was scored all the same
        assert service.end() == 0
        assert service.process.stderr is not None
        assert service.process.stderr.read() == ""


@pytest.mark.full
def test_a_request_has_a_time_limit_and_a_full_queue_is_refused_but_not_a_large_group_when_it_is_empty(
    own: str,
) -> None:
    flags = ("--timeout-s", "3", "--max-queued", "3", "--request-timeout-s", "0.3")
    with ServiceProcess(*flags, reward_type=own) as service:
        status, _, reply = ask(service, ["sleep"])
        assert (status, reply) == (504, {"error": "not scored within 0.3 s"})
        assert service.health()["queued"] == 1
        status, headers, reply = ask(service, ["5", "5", "5"])
        assert (status, headers["retry-after"]) == (503, "1")
        assert reply == {"error": "too many responses are waiting to be scored"}
        wait_until(lambda: service.health()["queued"] == 0)
        assert ask(service, ["x"] * 4)[0] in (200, 504)


def test_a_connection_that_sends_no_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    import uvicorn

    from rewards.commands import serve_command

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("no request was complete")

    async def talk() -> None:
        config = uvicorn.Config(
            app, http=serve_command._IdleTimeoutProtocol, lifespan="off", ws="none", log_config=None
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.startup([listener])
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        trickle = asyncio.create_task(send_slowly(writer))
        assert await asyncio.wait_for(reader.read(), 60) == b""
        trickle.cancel()
        await server.shutdown([listener])

    async def send_slowly(writer: Any) -> None:
        while True:  # a header without an end
            writer.write(b"G")
            await asyncio.sleep(0.05)

    monkeypatch.setattr(serve_command, "_IDLE_S", 0.3)
    asyncio.run(talk())
