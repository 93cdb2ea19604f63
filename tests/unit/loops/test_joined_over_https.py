"""Test producers that join a run over HTTPS: real server and client, real transport, a run in threads."""

import json
import socket
import subprocess
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest

from coati_rl.config.cli import build_job
from coati_rl.config.config import Config
from coati_rl.errors import ConfigError, EngineError, PeerLostError
from producer.joining.client import JoinConnection
from producer.joining.frames import PROTOCOL, Frame
from producer.joining.server import JoinServer
from producer.joining.session import JoinedSession
from producer.run_engine import load_engine
from tests.unit.loops.harness import ThreadedRun, parity_reward
from tests.unit.loops.watched_engine import InlineReward

TOKEN = "0123456789abcdef"
STEPS = {"n_behind": 1, "inference_microbatch_size": 1, "num_episodes": 2, "heartbeat_timeout_s": 5.0, "kl_coeff": 0.0}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate of 127.0.0.1, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=coati"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"join_cert": str(cert), "join_key": str(key), "join_port": port}


def slow_reward(response, ground_truth):
    """Take long enough for each producer to get prompts."""
    time.sleep(0.05)
    return parity_reward(response, ground_truth)


class StuckReward:
    """Never scores."""

    def submit(self, responses, problem):
        return Future()

    def close(self):
        pass


class JoinedRun(ThreadedRun):
    """A run of which producer 0 is its own; `joins` says for each other one how it ends: "stays", "leaves", "dies"."""

    def __init__(self, values, *, joins, **options):
        super().__init__(values, replace=False, **options)
        self.joins, self.sessions, self.said = joins, [], []
        self.served = JoinServer(self._config, dtype="float32", token=TOKEN)

    def run(self):
        try:
            return super().run()
        finally:
            self.served.close()

    def _add_producer(self):
        super()._add_producer()
        for end in self.joins:
            self._start(self._join, end)
            self._admit()

    def _admit(self):
        deadline = time.monotonic() + 60.0
        while not (keys := self.served.waiting()):
            assert time.monotonic() < deadline and not self._errors, self._errors
            time.sleep(0.01)
        number = len(self._producers)
        self.served.admit(keys[0], number)
        self._producers[number] = self.served._by_number[number]
        self._producers[number].close = lambda: self.served.tell_over(10.0)
        self._coordinator.add_producer(number, is_extra=True)
        self._start(self._run_joined, number)

    def _run_joined(self, number):
        """Be the supervisor's side of it."""
        cause = "its machine goes"
        try:
            if not self.served.call(number, "run", (self._coordinator,)):
                return
        except PeerLostError as error:
            cause = str(error)
        self._coordinator.remove_producer(number, cause, leaves=True)
        self._producers[number].end()

    def _join(self, end):
        """Be `coati-rl join` on another machine."""
        connection = connect(self._config)
        try:
            hello = connection.ask("hello").fields
            config = build_job(hello["config"], Config)
            assert config == self._config
            engine = load_engine(config, self._context("joined"))
            reward = StuckReward() if end == "dies" else InlineReward(self._score)
            fields = {name: hello[name] for name in ("protocol", "version", "identity")}
            connection.use_key(connection.ask("join", Frame(fields=fields)).fields["key"])
            session = JoinedSession(connection, config, self._context("joined"))
            self.sessions.append(session)
            self._start(self._end_session, session, end)
            session.run(engine, reward, self.said.append)
        except (ConnectionAbortedError, PeerLostError) as error:
            self.said.append(str(error))
        finally:
            connection.close()

    def _end_session(self, session, end):
        """End it when it holds prompts, as the machine does."""
        if end == "stays":
            return
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline and not self._is_over:
            if session._loop is not None and session._loop._runner.lease_ids + session._loop._scoring:
                if end == "leaves":
                    session.leave()
                else:
                    session._is_over.set()
                    session._fail(ConnectionAbortedError("killed"))
                return
            time.sleep(0.001)


def connect(config, token=TOKEN):
    url = f"https://127.0.0.1:{config.parallel.join_port}"
    return JoinConnection(url, token, ca_file=Path(config.parallel.join_cert), patience_s=2.0)


@pytest.fixture
def joined_run(small_run, tmp_path, certificate):
    def run(*joins, **changes):
        values = {**small_run, "run_dir": str(tmp_path / "run"), **STEPS, **certificate, **changes}
        made = JoinedRun(values, joins=joins, score=slow_reward)
        return made, made.run()

    return run


def trained(trace):
    lines = [json.loads(line) for path in sorted(trace.paths.rollouts.iterdir()) for line in path.open()]
    return [line for line in lines if line["is_trained"]]


def test_what_joins_leaves_and_dies_changes_no_prompt_of_the_run(joined_run):
    run, trace = joined_run("stays", "leaves", "dies")
    lines = trained(trace)
    assert Counter((line["uid"], line["sample"]) for line in lines) == {
        (f"train-{row}.{episode}", sample): 1 for row in range(8) for episode in range(2) for sample in range(2)
    }, "each sample of each prompt is trained once"
    assert [record["step"] for record in trace.steps] == [*range(1, 9)]
    assert any(line["producer"] == 1 for line in lines), "what stays works"
    gone = {event["producer"]: event["cause"] for kind in ("left", "lost") for event in trace.of(f"producer_{kind}")}
    assert gone.keys() == {2, 3} and "no request for" in gone[3]
    assert gone[2] == "its machine goes", "whether it had a commit to answer or not"
    own, joined = trace.engines[0], trace.engines[1]
    assert joined.digests == own.digests and len(own.digests) >= 4, "of every sync the same digest"
    assert max(step["staleness_max"] for step in trace.steps) <= 1
    assert "the run is over" in run.said and "has given its prompts back" in run.said


def test_a_stranger_another_model_and_another_version_are_refused(config_with, certificate):
    config = config_with(**certificate)
    served = JoinServer(config, dtype="float32", token=TOKEN)
    try:
        with pytest.raises(ConfigError, match="status 401: the token is not that of the run"):
            connect(config, token="f" * 16).ask("hello")
        connection = connect(config)
        own = {name: connection.ask("hello").fields[name] for name in ("protocol", "version", "identity")}
        assert own["protocol"] == PROTOCOL
        for name, other in (("protocol", 0), ("version", "0.0.1"), ("identity", "f" * 32)):
            with pytest.raises(EngineError, match=f"its {name} is {other}, that of the run "):
                connection.ask("join", Frame(fields={**own, name: other}))
        connection.use_key("f" * 32)
        with pytest.raises(PeerLostError, match="does not know this producer"):
            connection.ask("beat")
        with pytest.raises(ConfigError, match="status 400"):
            connection.ask("join")
        assert served.waiting() == []
        keys = [connection.ask("join", Frame(fields=own)).fields["key"]]
        assert served.waiting() == keys and served.waiting() == [], "each gets one number"
    finally:
        served.close()


def test_a_run_that_is_gone_is_an_error_when_patience_is_over(config_with, certificate):
    begin = time.monotonic()
    with pytest.raises(PeerLostError):
        connect(config_with(**certificate)).ask("hello")
    assert time.monotonic() - begin >= 2.0
