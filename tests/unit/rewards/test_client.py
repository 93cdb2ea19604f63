"""Test the client of a reward service: when it retries, when it gives up, and that a failure is never a zero."""

import json
import logging
import time
from concurrent.futures import Future
from email.utils import formatdate

import pytest

from coati_rl.errors import RunError
from coati_rl.types import Problem, Score
from rewards.remote.client import RemoteScorer
from tests.unit.rewards.http_server import Script, ScriptedServer, free_port_url, reset

FIVE = Problem(
    ground_truth="5", uid="gsm8k-1", messages=({"role": "user", "content": "2 + 3?"},), prompt="u:2 + 3?\na:"
)
RIGHT = {"reward": 1.0, "answer_correct": True, "format_valid": True, "verdict": "ok", "detail": "5 equals 5"}


def reply(fields: object) -> Script:
    return 200, {"Content-Type": "application/json"}, json.dumps(fields).encode()


ONE_RIGHT = reply({"scores": [RIGHT]})


def score(server_url: str, responses: list[str], *, timeout_s: float = 10.0) -> list[Score]:
    scorer = RemoteScorer(server_url, token="secret", reward_type="boxed", timeout_s=timeout_s)
    try:
        return scorer.submit(responses, FIVE).result(timeout_s + 5)
    finally:
        scorer.close()


def test_the_request_holds_the_responses_the_whole_problem_and_the_token() -> None:
    with ScriptedServer(ONE_RIGHT) as server:
        assert score(f"{server.url}/rewards/", ["5"]) == [Score(**RIGHT)]
    ((method, path, headers, body),) = server.requests
    assert (method, path) == ("POST", "/rewards/score")
    assert headers["authorization"] == "Bearer secret"
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == {
        "responses": ["5"],
        "problem": {
            "ground_truth": "5",
            "uid": "gsm8k-1",
            "messages": [{"role": "user", "content": "2 + 3?"}],
            "prompt": "u:2 + 3?\na:",
        },
        "reward_type": "boxed",
    }


def test_a_breakdown_comes_through() -> None:
    with ScriptedServer(reply({"scores": [RIGHT | {"breakdown": {"boxed": 1.0, "brevity": -0.5}}]})) as server:
        (got,) = score(server.url, ["5"])
    assert got.breakdown == {"boxed": 1.0, "brevity": -0.5}


def test_no_responses_have_no_scores_and_need_no_service() -> None:
    assert score(free_port_url(), []) == []


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_service_that_is_busy_is_asked_again(status: int) -> None:
    with ScriptedServer((status, {}, b"busy"), reset, ONE_RIGHT) as server:
        assert score(server.url, ["5"])[0].verdict == "ok"
    assert len(server.requests) == 3


def test_pauses_between_attempts_grow() -> None:
    with ScriptedServer(*[(503, {}, b"")] * 3, ONE_RIGHT) as server:
        score(server.url, ["5"])
    pauses = [after - before for before, after in zip(server.times, server.times[1:], strict=False)]
    least_s = [0.1, 0.2, 0.4]  # half of 0.2 s, doubled each time; random up to all of it
    assert all(pause >= least for pause, least in zip(pauses, least_s, strict=True))


@pytest.mark.parametrize("header", ["1", "a date"])
def test_a_retry_after_is_waited_for(header: str) -> None:
    value = header if header == "1" else formatdate(time.time() + 2.0, usegmt=True)  # whole seconds: 1 to 2 from now
    with ScriptedServer((503, {"Retry-After": value}, b""), ONE_RIGHT) as server:
        assert score(server.url, ["5"])[0].verdict == "ok"
    assert server.times[1] - server.times[0] >= 0.9


def test_a_retry_after_beyond_the_time_limit_is_not_waited_for() -> None:
    with ScriptedServer((503, {"Retry-After": "3600"}, b"restarting")) as server:
        started = time.monotonic()
        (got,) = score(server.url, ["5"], timeout_s=60.0)
    assert time.monotonic() - started < 30.0
    assert got.verdict == "invalid"
    assert "status 503: restarting" in got.detail


@pytest.mark.parametrize("header", ["soon", "-5", "1e3", "nan", "9" * 400])
def test_a_retry_after_that_says_nothing_or_never_does_no_harm(header: str) -> None:
    with ScriptedServer((503, {"Retry-After": header}, b""), ONE_RIGHT) as server:
        started = time.monotonic()
        got = score(server.url, ["5"], timeout_s=60.0)
    assert got[0].verdict == ("invalid" if header.startswith("9") else "ok")
    assert time.monotonic() - started < 30.0


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 500])
def test_an_answer_that_another_attempt_would_not_change_is_invalid_at_once(status: int) -> None:
    with ScriptedServer((status, {}, b'{"error": "no such thing"}')) as server:
        (got,) = score(server.url, ["5"])
    assert got.verdict == "invalid"
    assert f"status {status}" in got.detail
    assert "no such thing" in got.detail
    assert len(server.requests) == 1


def test_a_redirect_is_not_followed_and_the_token_goes_nowhere_else() -> None:
    with ScriptedServer(ONE_RIGHT) as other:
        with ScriptedServer((302, {"Location": f"{other.url}/score"}, b"")) as server:
            (got,) = score(server.url, ["5"])
        assert other.requests == []
    assert got.verdict == "invalid"
    assert "is not followed" in got.detail


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>Welcome to the network</html>",
        b"[]",
        b'{"scores": []}',
        json.dumps({"scores": [RIGHT, RIGHT]}).encode(),
        json.dumps({"scores": [RIGHT | {"verdict": "fine"}]}).encode(),
        json.dumps({"scores": [RIGHT | {"reward": "1.0"}]}).encode(),
        json.dumps({"scores": [RIGHT | {"reward": True}]}).encode(),
        json.dumps({"scores": [RIGHT | {"reward": float("nan")}]}).encode(),
        json.dumps({"scores": [RIGHT | {"answer_correct": 1}]}).encode(),
        json.dumps({"scores": [RIGHT | {"breakdown": {"a": float("inf")}}]}).encode(),
        json.dumps({"scores": [{"reward": 1.0}]}).encode(),
        b"\x80\x04\x95\x00.",
    ],
)
def test_a_reply_that_is_no_list_of_scores_is_invalid(content: bytes) -> None:
    with ScriptedServer((200, {}, content)) as server:
        (got,) = score(server.url, ["5"])
    assert (got.verdict, got.reward) == ("invalid", 0.0)
    assert "the reply" in got.detail
    assert "\n" not in got.detail


def test_a_compressed_reply_is_not_unpacked() -> None:
    import gzip

    content = gzip.compress(json.dumps({"scores": [RIGHT]}).encode())
    with ScriptedServer((200, {"Content-Encoding": "gzip"}, content)) as server:
        assert score(server.url, ["5"])[0].verdict == "invalid"


def test_a_service_that_is_away_makes_the_group_invalid_when_its_time_is_over() -> None:
    started = time.monotonic()
    scores = score(free_port_url(), ["5", "6"], timeout_s=0.5)
    assert time.monotonic() - started < 30.0
    assert [got.verdict for got in scores] == ["invalid", "invalid"]
    assert "Connect call failed" in scores[0].detail


@pytest.mark.parametrize("way", ["hang", "trickle", "trickle_header"])
def test_a_reply_that_never_ends_makes_the_group_invalid_when_its_time_is_over(way: str) -> None:
    with ScriptedServer() as server:
        server.script.append(getattr(server, way))
        started = time.monotonic()
        (got,) = score(server.url, ["5"], timeout_s=0.5)
        assert time.monotonic() - started < 30.0
    assert got.verdict == "invalid"


def test_groups_beyond_the_requests_in_flight_wait_and_have_their_own_time_then() -> None:
    with ScriptedServer() as server:
        server.script.append(server.hang)
        scorer = RemoteScorer(server.url, token="secret", max_in_flight=2, timeout_s=0.3)
        started = time.monotonic()
        futures = [scorer.submit(["5"], FIVE) for _ in range(6)]
        assert [future.result(60)[0].verdict for future in futures] == ["invalid"] * 6
        assert time.monotonic() - started > 0.89  # three rounds of two
        scorer.close()
    assert len(server.requests) == 6


def test_closing_breaks_off_what_hangs_at_once() -> None:
    with ScriptedServer() as server:
        server.script.append(server.hang)
        scorer = RemoteScorer(server.url, token="secret", timeout_s=600.0, max_in_flight=1)
        futures = [scorer.submit(["5"], FIVE) for _ in range(3)]
        while not server.requests:
            time.sleep(0.01)
        scorer.close()
        assert not scorer._thread.is_alive()
    for future in futures:
        with pytest.raises(RunError, match="closed before"):
            future.result(0)
    with pytest.raises(RunError, match="is closed"):
        scorer.submit(["5"], FIVE)
    scorer.close()


def test_a_callback_of_a_future_may_submit_the_next_group() -> None:
    with ScriptedServer(ONE_RIGHT) as server:
        scorer = RemoteScorer(server.url, token="secret")
        second: Future[Future[list[Score]]] = Future()
        scorer.submit(["5"], FIVE).add_done_callback(lambda _: second.set_result(scorer.submit(["5"], FIVE)))
        assert second.result(30).result(30)[0].verdict == "ok"
        scorer.close()


def test_an_outage_is_logged_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedServer((500, {}, b""), (500, {}, b""), ONE_RIGHT) as server, caplog.at_level(logging.WARNING):
        scorer = RemoteScorer(server.url, token="secret")
        for _ in range(4):
            scorer.submit(["5"], FIVE).result(30)
        scorer.close()
    assert [record.message for record in caplog.records if record.name == "rewards.remote.client"] == [
        f"the reward service {server.url} fails; its responses are scored as invalid: status 500: ",
        f"the reward service {server.url} answers again",
    ]


def test_a_server_that_does_not_speak_tls_is_not_asked_again() -> None:
    with ScriptedServer(ONE_RIGHT) as server:
        (got,) = score(server.url.replace("http://", "https://"), ["5"], timeout_s=600.0)
    assert got.verdict == "invalid"
    assert "SSL" in got.detail


def test_no_proxy_is_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer((200, {}, b"from the proxy")) as proxy, ScriptedServer(ONE_RIGHT) as server:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert score(server.url, ["5"])[0].verdict == "ok"
        assert score(server.url.replace("127.0.0.1", "localhost"), ["5"])[0].verdict == "ok"
        assert proxy.requests == []


def test_a_proxy_is_asked_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(ONE_RIGHT) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert score("http://verifier.example:8765", ["5"])[0].verdict == "ok"
    assert proxy.requests[0][1] == "http://verifier.example:8765/score"


def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://proxy.example:1080")
    (got,) = score("http://verifier.example:8765", ["5"])
    assert got.verdict == "invalid"
    assert "the proxy in the environment: " in got.detail
