"""Test the engine of a real vLLM server where it differs from engines in the run's own processes."""

import json
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from coati_rl.errors import ConfigError, EngineError
from producer.engines.served.identity import check_server
from producer.engines.served.server import LOST_AFTER_S, Server
from producer.engines.served.vllm_identity import LOADER
from tests.integration.engines.engine_process import HostedEngine
from tests.integration.engines.harness import request
from tests.integration.engines.other_model import refusal_of_another_model
from tests.integration.engines.vllm_server import vllm_server

pytestmark = pytest.mark.full
RECORDED = json.loads((Path(__file__).parents[2] / "data" / "vllm_server" / "replies.json").read_text())
PROMPT = range(40, 60)


@pytest.fixture(scope="module")
def server(checkpoints, tmp_path_factory):
    with vllm_server(checkpoints["untied"][0], tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture
def start_engine(server, checkpoints, tmp_path):
    """Start engines of the server, as a run's producers do."""
    settings = {"model": str(checkpoints["untied"][0]), "max_model_len": 256, "weights_dir": str(tmp_path)}
    engines = []

    def start():
        engines.append(HostedEngine(server.url, settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def engine(start_engine):
    return start_engine()


def ask(server, path, body):
    content = json.dumps(body).encode()
    asked = Request(server.url + path, data=content, headers={"Content-Type": "application/json"})
    with urlopen(asked, timeout=60) as reply:
        return json.loads(reply.read())


def test_an_aborted_request_has_its_tokens_so_far(engine):
    engine.submit(request("long", PROMPT, num_samples=4, max_new_tokens=200, seed=3))
    whole = engine.result("long", 60.0).completions
    engine.submit(request("cut", PROMPT, num_samples=4, max_new_tokens=200, seed=3))
    engine.abort("cut")
    for before, after in zip(whole, engine.result("cut", 60.0).completions, strict=True):
        length = len(after.token_ids)
        assert after.token_ids.tolist() == before.token_ids.tolist()[:length]
        assert after.finish_reason == ("abort" if length < len(before.token_ids) else before.finish_reason)


def test_the_recorded_replies_have_the_forms_of_the_server(server):
    body = {"token_ids": [40, 41, 42], "sampling_params": {"n": 2, "seed": 11, "max_tokens": 3, "logprobs": 0}}
    found, recorded = ask(server, "/inference/v1/generate", body), RECORDED["/inference/v1/generate"][1]
    assert _form(found) == _form(recorded)
    assert [choice["token_ids"] for choice in found["choices"]] == [each["token_ids"] for each in recorded["choices"]]
    found = ask(server, "/weight_checker", {"action": "checksum"})["checksums"]
    assert found.keys() == RECORDED["/weight_checker"][1]["checksums"].keys()
    found = ask(server, "/collective_rpc", {"method": "get_model_inspection"})
    assert found == RECORDED["inspection"][1]


def _form(value):
    """The names and types in a reply, of lists those of their first item."""
    if isinstance(value, dict):
        return {name: _form(each) for name, each in value.items()}
    return [_form(value[0])] if isinstance(value, list) and value else type(value)


def test_another_model_and_its_tokenizer_are_refused_before_anything_starts(server, tmp_path, checkpoints):
    refusal = refusal_of_another_model(server.url, checkpoints["untied"][0], tmp_path)
    for reason in ("have 256 tokens at most", "its vocabulary has 320 tokens, not 512", "its tokenizer is not that of"):
        assert reason in refusal


def test_a_tied_model_needs_the_loader_on_the_cpu(checkpoints, tmp_path):
    with vllm_server(checkpoints["tied"][0], tmp_path / "log") as server:
        asker = Server(server.url)
        with pytest.raises(ConfigError, match=f"--worker-extension-cls {LOADER}"):
            check_server(asker, checkpoints["tied"][0], dtype="float32", max_model_len=256, timeout_s=10.0)
        asker.close()


def test_a_server_that_a_killed_run_has_left_paused_samples_for_another(server, start_engine):
    ask(server, "/pause?mode=keep", {})
    engine = start_engine()
    engine.submit(request("one", PROMPT))
    assert engine.result("one", 60.0).error is None


def test_another_program_that_changes_the_weights_is_noticed_at_the_next_token(engine, server):
    ask(server, "/update_weight_version", {"new_version": "theirs"})
    engine.submit(request("one", PROMPT))
    with pytest.raises(EngineError, match="weights 'theirs', which this run has not sent"):
        engine.result("one", 60.0)


def test_a_server_that_hangs_is_lost_within_its_deadline(engine, server):
    engine.submit(request("before", PROMPT))
    assert engine.result("before", 60.0).error is None
    server.stop()
    begin = time.monotonic()
    engine.submit(request("one", PROMPT))
    with pytest.raises(EngineError, match=f"the server {server.url} is lost"):
        engine.result("one", 90.0)
    assert time.monotonic() - begin < LOST_AFTER_S + 15.0
