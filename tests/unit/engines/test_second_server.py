"""Test that the second of two servers serves on when the first is lost, and that the first is used when it is back."""

import contextlib
import threading

import pytest

from coati_rl.config.engine_urls import ServerShares
from coati_rl.errors import EngineError
from producer.engines.served import server as served_server
from tests.integration.engines.conftest import make_tokenizer, save_checkpoint
from tests.integration.engines.engine_process import HostedEngine
from tests.integration.engines.harness import Harness, request
from tests.unit.engines.recorded_server import REPLIES, RecordedServer

PROMPT = (40, 41, 42)
TOKENS = [choice["token_ids"] for choice in REPLIES["/inference/v1/generate"][1]["choices"]]
GENERATE = "/inference/v1/generate"


@pytest.fixture
def model(tmp_path):
    return save_checkpoint(tmp_path / "model", 0, tied=False)


@pytest.fixture
def servers(model):
    with contextlib.ExitStack() as stack:
        servers = [RecordedServer(model, make_tokenizer()) for _ in range(2)]
        for server in servers:
            stack.callback(server.close)
        yield servers


@pytest.fixture
def start(servers, model, tmp_path):
    """(number of a producer, which servers are whose) -> its engine."""
    with contextlib.ExitStack() as stack:

        def start(producer_id, shares):
            settings = {"model": str(model), "max_model_len": 256, "weights_dir": str(tmp_path / f"{producer_id}")}
            harness = Harness(HostedEngine(shares.take(producer_id), settings), ())
            stack.callback(harness.sender.close)
            stack.callback(harness.engine.shutdown)
            return harness

        yield start


def num_generated(server):
    return server.paths().count(GENERATE)


def test_the_second_server_serves_on_and_a_replacement_takes_the_first_when_it_is_back(monkeypatch, servers, start):
    monkeypatch.setattr(served_server, "LOST_AFTER_S", 2.0)
    monkeypatch.setattr(served_server, "_WATCH_S", 0.05)
    shares = ServerShares([server.url for server in servers])
    first, second = (start(producer_id, shares) for producer_id in (0, 1))
    servers[0].holds = threading.Event()
    first.engine.submit(request("held", PROMPT))
    servers[0].replies["/health"] = [503, None]
    with pytest.raises(EngineError, match=f"the server {servers[0].url} is lost: status 503"):
        first.engine.result("held", 10.0)
    samples = second.complete(PROMPT, num_samples=2, max_new_tokens=3)
    assert [sample.token_ids.tolist() for sample in samples] == TOKENS
    servers[0].holds.set()
    shares.release(0)

    del servers[0].replies["/health"]
    replacement = start(2, shares)
    before = [num_generated(server) for server in servers]
    assert replacement.complete(PROMPT, max_new_tokens=3)[0].token_ids.tolist() == TOKENS[0]
    assert [num_generated(server) for server in servers] == [before[0] + 1, before[1]]
    assert second.complete(PROMPT, max_new_tokens=3)[0].token_ids.tolist() == TOKENS[0], "under its own version still"
