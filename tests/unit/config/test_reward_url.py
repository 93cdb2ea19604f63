"""Test that credentials of reward models come from the environment, and are never written or logged."""

import pickle

import pytest

import rl_example
from coati_rl.config.cli import build_config, parse
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.reward_spec import parse_reward_type
from coati_rl.reward_url import redacted, secrets_of
from coati_rl.types import Problem
from rewards.scorer import scorer_factory
from tests.unit.rewards.http_server import ScriptedServer

SECRET = "hunter2"
WITH_SECRETS = [
    "http://me:hunter2@host/score",
    "https://hunter2@host/score",
    "boxed=1,http://me:hunter2@host/score=0.5",
    "http://me:hun/ter2hunter2@host",
    "http://me:x,hunter2@host",
    "http://host/score?key=hunter2",
    "http://host/score?k=3&api_key=hunter2",
    "http://host/score?access_token=hunter2=0.5",
    "http://host/score?Subscription-Key=hunter2",
    "http://host/score?sig=hunter2",
    "http://host/score#token=hunter2",
    "http:/me:hunter2@host",
    "me:hunter2@host",
    "http://me:hunter2@",
    "http://host?key=${RM_KEY}hunter2",
]


@pytest.mark.parametrize("reward_type", WITH_SECRETS)
def test_a_run_with_a_secret_in_an_address_is_refused_and_the_secret_not_told(reward_type, capsys, tmp_path):
    run_dir = tmp_path / "run"
    assert rl_example.main(["-rt", reward_type, "-m", "m", "-d", "d.jsonl", "--run-dir", str(run_dir)], tmp_path) == 2
    told = capsys.readouterr()
    assert "--reward-type" in told.err
    assert SECRET not in told.err + told.out
    assert not run_dir.exists()


@pytest.mark.parametrize(
    "url", ["http://me:hunter2@host", "http://host?token=hunter2", "host?token=hunter2", "me:hunter2@host"]
)
def test_the_same_of_the_address_of_a_service(url, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COATI_REWARD_TOKEN", "a-token-of-this-test")
    (tmp_path / "d.jsonl").touch()
    assert rl_example.main(["-rt", "code", "-cv", url, "-m", "m", "-d", f"{tmp_path}/d.jsonl"], tmp_path) == 2
    told = capsys.readouterr()
    assert "--code-verifier-api-url" in told.err
    assert SECRET not in told.err + told.out


def test_the_message_says_what_to_write_instead():
    with pytest.raises(
        ConfigError, match=r"http://\.\.\.@host/score holds a user or a password .* write \$\{NAME\} in its"
    ):
        parse_reward_type("http://me:hunter2@host/score")
    with pytest.raises(ConfigError, match=r"http://host/score\?\.\.\. holds a value of 'key', which would be written"):
        parse_reward_type("http://host/score?key=hunter2")


@pytest.mark.parametrize("url", ["http://host/a?k=3", "http://host/a?model=small&max_tokens=5", "http://host/m%40v1"])
def test_other_addresses_are_as_before(url):
    assert parse_reward_type(url)[0].name == url


@pytest.mark.full
def test_a_secret_of_the_environment_is_sent_and_neither_written_nor_told(monkeypatch):
    monkeypatch.setenv("RM_USER", "me")
    monkeypatch.setenv("RM_PASSWORD", "hun@ter/2")
    monkeypatch.setenv("RM_KEY", SECRET)
    with ScriptedServer((403, {}, b"no such key: hunter2"), (200, {}, b'{"rewards": [1.0]}')) as server:
        address = server.url.replace("http://", "http://${RM_USER}:${RM_PASSWORD}@") + "/score?key=${RM_KEY}"
        config = build_config({"reward_type": address})
        check(config)
        factory = pickle.loads(pickle.dumps(scorer_factory(config)))
        for name in ("RM_USER", "RM_PASSWORD", "RM_KEY"):
            monkeypatch.delenv(name)  # a producer on another node has none
        scorer = factory()
        try:
            refused, scored = (scorer.submit(["a"], Problem(ground_truth="")).result(60)[0] for _ in range(2))
        finally:
            scorer.close()
    assert (refused.verdict, scored.verdict, scored.reward) == ("invalid", "ok", 1.0)
    assert "no such key: ..." in refused.detail
    _, path, headers, _ = server.requests[1]
    assert path == "/score?key=hunter2"
    assert headers["authorization"] == "Basic bWU6aHVuQHRlci8y"  # me:hun@ter/2
    for text in (config.model_dump_json(), repr(factory.args[0]), refused.detail):
        assert SECRET not in text
        assert "ter/2" not in text


def test_a_variable_that_is_not_set_is_refused():
    config, _ = parse(["-rt", "http://host?key=${NO_SUCH_VARIABLE}"])
    with pytest.raises(ConfigError, match=r"\$\{NO_SUCH_VARIABLE\} is not set; export NO_SUCH_VARIABLE="):
        scorer_factory(config)
    assert secrets_of("/a${HOME}.py:f", {}) == {}


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("http://me:a@b@host/x?k=1,boxed", "http://...@host/x?...,boxed"),
        ("boxed=1,mine.py:f", "boxed=1,mine.py:f"),
    ],
)
def test_what_messages_show_of_an_address(text, public):
    assert redacted(text) == public
