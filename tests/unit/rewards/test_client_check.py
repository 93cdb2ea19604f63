"""Test the check before a run: wrong addresses, tokens and services are refused."""

import json
import os

import pytest

from coati_rl import __version__
from coati_rl.errors import ConfigError
from rewards.remote.client import RemoteScorer, check_service, token_from_environment
from tests.unit.rewards.http_server import Script, ScriptedServer, free_port_url, reset

HEALTH = {"status": "ok", "reward_type": "boxed", "version": __version__, "num_workers": 1, "queued": 0}


def reply(fields: object) -> Script:
    return 200, {"Content-Type": "application/json"}, json.dumps(fields).encode()


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8765", "ftp://host", "http://", "http://host:0", "http://host:port", "http://ho st"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--code-verifier-api-url.*write http://HOST:PORT"):
        RemoteScorer(url, token="secret")


def test_an_address_with_a_password_or_a_query_is_refused_and_the_password_not_told() -> None:
    with pytest.raises(ConfigError, match="leave user and password out") as raised:
        RemoteScorer("http://me:hunter2@host:8765", token="secret")
    assert "hunter2" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"without what follows the \?"):
        RemoteScorer("http://host:8765?a=b", token="secret")


@pytest.mark.parametrize("token", ["", "two words", "newline\n", "naïve"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="COATI_REWARD_TOKEN"):
        RemoteScorer("http://127.0.0.1:1", token=token)


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "COATI_REWARD_TOKEN", " secret\n")
    assert token_from_environment() == "secret"
    monkeypatch.delenv("COATI_REWARD_TOKEN")
    with pytest.raises(ConfigError, match="set COATI_REWARD_TOKEN"):
        token_from_environment()


@pytest.mark.parametrize(("name", "value"), [("max_in_flight", 0), ("timeout_s", 0.0), ("timeout_s", -1.0)])
def test_sizes_that_are_not_positive_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value:g}"):
        RemoteScorer("http://127.0.0.1:1", token="secret", **{name: value})


def test_the_check_asks_for_health_and_then_with_the_token_for_no_scores() -> None:
    with ScriptedServer(reply(HEALTH), reply({"scores": []})) as server:
        check_service(server.url, token="secret", reward_type="boxed")
    assert [(method, path) for method, path, _, _ in server.requests] == [("GET", "/health"), ("POST", "/score")]
    assert "authorization" not in server.requests[0][2]
    assert json.loads(server.requests[1][3])["responses"] == []


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ([reply(HEALTH), (401, {}, b'{"error": "wrong token"}')], "wrong token.*set COATI_REWARD_TOKEN"),
        ([reply(HEALTH), (403, {}, b"")], "status 403.*set COATI_REWARD_TOKEN"),
        ([(404, {}, b"not here")], "status 404: not here; give the address of a running python -m rewards serve"),
        ([(301, {"Location": "https://other/health"}, b"")], "a redirect to https://other/health"),
        ([(200, {}, b"<html>")], "no reward service answers there"),
        ([reply({"status": "ok"})], "no reward service answers there"),
        ([reply(HEALTH | {"reward_type": "code"})], "the service scores 'code', this run needs 'boxed'.*--type boxed"),
        ([reply(HEALTH), (422, {}, b'{"error": "reward_type: no"}')], "status 422.*reward_type: no"),
        ([reply(HEALTH), reply({"scores": "none"})], "not a list of scores"),
    ],
)
def test_the_check_names_address_fault_and_remedy(script: list[Script], complaint: str) -> None:
    with ScriptedServer(*script) as server, pytest.raises(ConfigError, match=complaint) as raised:
        check_service(server.url, token="secret", reward_type="boxed")
    assert server.url in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_check_of_a_service_that_is_away_ends_and_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.remote.client._CHECK_S", 0.5)
    with pytest.raises(ConfigError, match=r"no reward service answers.*start one with python -m rewards serve"):
        check_service(free_port_url(), token="secret")


def test_the_check_waits_for_a_service_that_does_not_answer_yet() -> None:
    with ScriptedServer(reset, (503, {}, b""), reply(HEALTH), reply({"scores": []})) as server:
        check_service(server.url, token="secret", reward_type="boxed")
    assert [path for _, path, _, _ in server.requests] == ["/health", "/health", "/health", "/score"]


def test_a_service_of_another_version_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedServer(reply(HEALTH | {"version": "9.9"}), reply({"scores": []})) as server:
        scorer = RemoteScorer(server.url, token="secret")
        scorer.check()
        scorer.close()
    assert "has version 9.9" in caplog.text
