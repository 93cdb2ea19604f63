"""Test the engine of a real SGLang server where it differs from other engines; the contract has it as well."""

import json
from pathlib import Path

import pytest

from tests.integration.engines.engine_process import HostedEngine
from tests.integration.engines.harness import Harness, request
from tests.integration.engines.other_model import refusal_of_another_model
from tests.integration.engines.record_sglang import record
from tests.integration.engines.sglang_server import sglang_server

pytestmark = pytest.mark.full
RECORDED = json.loads((Path(__file__).parents[2] / "data" / "sglang_server" / "replies.json").read_text())
PROMPT = tuple(range(40, 60))


@pytest.fixture(scope="module")
def server(checkpoints, tmp_path_factory):
    with sglang_server(checkpoints["untied"][0], tmp_path_factory.mktemp("server") / "log") as server:
        yield server


def test_an_engine_samples_aborts_and_takes_weights(server, checkpoints, tmp_path):
    settings = {"model": str(checkpoints["untied"][0]), "max_model_len": 256, "weights_dir": str(tmp_path)}
    engine = HostedEngine(server.url, settings)
    harness = Harness(engine, checkpoints["untied"])
    for top_k in (6, 1, 320):
        for sample in harness.complete(PROMPT, num_samples=4, temperature=0.8, top_k=top_k):
            assert harness.kept_logprob_gap(PROMPT, sample, temperature=0.8, top_k=top_k) < 1e-4
    stopped = harness.complete(PROMPT, num_samples=16, max_new_tokens=60, stop=("d", "zzz"))
    assert {sample.finish_reason for sample in stopped if sample.text.endswith("d")} == {"stop"}
    assert all("d" not in sample.text[:-1] for sample in stopped)
    harness.engine.submit(request("cut", PROMPT, num_samples=4, max_new_tokens=200))
    harness.engine.abort("cut")
    for sample in harness.engine.result("cut", 60.0).completions:
        assert sample.finish_reason in ("abort", "stop") and len(sample.token_ids) < 200
        assert len(sample.logprobs) == len(sample.token_ids)
    harness.sync(1)
    assert harness.probe_gap(PROMPT) < 1e-4
    engine.shutdown()
    harness.sender.close()


def test_another_model_and_its_tokenizer_are_refused_before_anything_starts(server, checkpoints, tmp_path):
    refusal = refusal_of_another_model(server.url, checkpoints["untied"][0], tmp_path)
    for reason in ("--context-length 520 or more", "its vocabulary has 320 tokens, not 512", "its tokenizer is not"):
        assert reason in refusal


def test_the_recorded_replies_have_the_forms_of_the_server(server, checkpoints):
    found = record(server.url, checkpoints["untied"][1])
    forms = [{name: (status, _form(body)) for name, (status, body) in each.items()} for each in (found, RECORDED)]
    assert forms[0] == forms[1]


def _form(value):
    """The names and types in a reply, of lists those of their first item; not what only cached prompts have."""
    if isinstance(value, dict):
        return {name: _form(each) for name, each in value.items() if name != "cached_tokens_details"}
    return [_form(value[0])] if isinstance(value, list) and value else type(value)
