"""A served reward model: OpenRLHF's protocol, and what is invalid instead of zero."""

import json
import time

import pytest

from coati_rl.errors import ConfigError
from coati_rl.types import Problem, Score
from rewards.http_model.http_reward import HttpReward
from tests.unit.rewards.http_server import Script, ScriptedServer, free_port_url, reset

PROBLEM = Problem(ground_truth="72", prompt="Q: 70 + 2? A: ")


def reply(fields: object) -> Script:
    return 200, {"Content-Type": "application/json"}, json.dumps(fields).encode()


def scores_of(server: ScriptedServer, responses: list[str], *, timeout_s: float = 5.0) -> list[Score]:
    return list(HttpReward(f"{server.url}/get_reward", timeout_s=timeout_s).score(responses, PROBLEM))


def test_the_request_holds_query_prompt_and_label_of_each_response() -> None:
    with ScriptedServer(reply({"rewards": [1.0, 0.25]})) as server:
        scores_of(server, ["72", "seventy"])
    ((method, path, headers, body),) = server.requests
    assert (method, path) == ("POST", "/get_reward")
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == {
        "query": ["Q: 70 + 2? A: 72", "Q: 70 + 2? A: seventy"],
        "prompts": ["Q: 70 + 2? A: ", "Q: 70 + 2? A: "],
        "labels": ["72", "72"],
    }


def test_without_scores_a_reward_of_1_or_more_counts_as_right() -> None:
    with ScriptedServer(reply({"rewards": [1, 2.5, 0.99, -3]})) as server:
        scores = scores_of(server, ["a", "b", "c", "d"])
    assert [score.reward for score in scores] == [1.0, 2.5, 0.99, -3.0]
    assert [score.answer_correct for score in scores] == [True, True, False, False]
    assert [score.verdict for score in scores] == ["ok", "ok", "wrong", "wrong"]
    assert all(score.format_valid for score in scores)


def test_scores_beside_the_rewards_decide_what_is_right_also_when_they_are_zero() -> None:
    with ScriptedServer(reply({"rewards": [5.0, -0.5], "scores": [0.0, 1.0], "extra_logs": {"x": [1, 2]}})) as server:
        scores = scores_of(server, ["a", "b"])
    assert [(score.reward, score.answer_correct) for score in scores] == [(5.0, False), (-0.5, True)]
    assert [score.filter_score for score in scores] == [0.0, 1.0]


def test_a_reward_that_is_too_large_to_train_on_is_invalid() -> None:
    with ScriptedServer(reply({"rewards": [1e300, 1.0]})) as server:
        scores = scores_of(server, ["a", "b"])
    assert [score.verdict for score in scores] == ["invalid", "ok"]
    assert scores[0].detail == "a reward of 1e+300 cannot be trained on; return at most 1e+09 in size"


def test_scores_of_null_are_none() -> None:
    with ScriptedServer(reply({"rewards": [1.0], "scores": None})) as server:
        assert scores_of(server, ["a"])[0].answer_correct


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "null", "true", '"1.0"', "[1.0]", "1e999"])
def test_what_is_no_finite_number_makes_its_own_response_invalid(value: str) -> None:
    body = f'{{"rewards": [1.0, {value}]}}'.encode()
    with ScriptedServer((200, {}, body)) as server:
        scores = scores_of(server, ["a", "b"])
    assert [score.verdict for score in scores] == ["ok", "invalid"]
    assert "finite number" in scores[1].detail


@pytest.mark.parametrize(
    "content",
    [
        b'{"rewards": [1.0]}',
        b'{"rewards": [1.0, 1.0, 1.0]}',
        b'{"rewards": 1.0}',
        b'{"reward": [1.0, 1.0]}',
        b'{"rewards": [1.0, 1.0], "scores": [1.0]}',
        b"[1.0, 1.0]",
        b"null",
        b"<html>sign in</html>",
        b"",
        b"[" * 100_000,
    ],
)
def test_a_reply_that_does_not_hold_a_number_per_response_makes_all_invalid(content: bytes) -> None:
    with ScriptedServer((200, {}, content)) as server:
        scores = scores_of(server, ["a", "b"])
    assert [score.verdict for score in scores] == ["invalid", "invalid"]
    assert scores[0].detail.startswith(f"the reward model {server.url.removeprefix('http://')}: the reply")
    assert len(server.requests) == 1


def test_a_model_that_is_busy_or_breaks_off_is_asked_again() -> None:
    with ScriptedServer((503, {}, b"busy"), reset, reply({"rewards": [1.0]})) as server:
        assert scores_of(server, ["a"])[0].verdict == "ok"
    assert len(server.requests) == 3


def test_a_model_that_is_away_makes_all_invalid_within_the_time_limit() -> None:
    reward = HttpReward(f"{free_port_url()}/get_reward", timeout_s=0.5)
    started = time.monotonic()
    scores = list(reward.score(["a", "b"], PROBLEM))
    assert time.monotonic() - started < 30.0
    assert [score.verdict for score in scores] == ["invalid", "invalid"]
    assert "Connect call failed" in scores[0].detail


@pytest.mark.parametrize("way", ["hang", "trickle", "trickle_header"])
def test_a_model_that_does_not_finish_its_reply_makes_all_invalid_within_the_time_limit(way: str) -> None:
    with ScriptedServer() as server:
        server.script.append(getattr(server, way))
        started = time.monotonic()
        scores = scores_of(server, ["a"], timeout_s=0.5)
        elapsed_s = time.monotonic() - started
    assert scores[0].verdict == "invalid"
    assert elapsed_s < 30.0


def test_a_model_that_fails_is_not_asked_again_and_the_reason_is_told() -> None:
    with ScriptedServer((500, {}, b"CUDA out of memory")) as server:
        (score,) = scores_of(server, ["a"])
    assert score.verdict == "invalid"
    assert "status 500: CUDA out of memory" in score.detail
    assert len(server.requests) == 1


def test_a_redirect_is_not_followed() -> None:
    with ScriptedServer(reply({"rewards": [1.0]})) as other:
        with ScriptedServer((307, {"Location": other.url}, b"")) as server:
            (score,) = scores_of(server, ["a"])
        assert other.requests == []
    assert score.verdict == "invalid"
    assert f"a redirect to {other.url}, which is not followed" in score.detail


def test_nothing_to_judge_needs_no_model() -> None:
    reward = HttpReward(free_port_url(), timeout_s=60.0)
    assert [score.verdict for score in reward.score([""], Problem(ground_truth="0"))] == ["invalid"]
    assert list(reward.score([], PROBLEM)) == []


def test_a_password_in_the_address_is_sent_and_not_told() -> None:
    with ScriptedServer((500, {}, b"")) as server:
        url = server.url.replace("http://", "http://me:secret@")
        (score,) = HttpReward(url, timeout_s=5.0).score(["a"], PROBLEM)
    assert server.requests[0][2]["authorization"] == "Basic bWU6c2VjcmV0"
    assert "secret" not in score.detail


@pytest.mark.parametrize("url", ["", "localhost:5000", "ftp://host/x", "http://", "http://host:port", "http://[::1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        HttpReward(url)


def test_a_query_in_the_address_is_kept() -> None:
    with ScriptedServer(reply({"rewards": [1.0]})) as server:
        list(HttpReward(f"{server.url}/reward?model=small", timeout_s=5.0).score(["a"], PROBLEM))
    assert server.requests[0][1] == "/reward?model=small"
