"""Test the engine of a server against replies recorded from SGLang's; what it shares with vLLM's is tested there."""

import hashlib
import math
import threading

import numpy as np
import pytest

from coati_rl.errors import ConfigError, EngineError
from producer.engines.admission import RequestRefusedError
from producer.engines.served.identity import check_server
from producer.engines.served.server import Server
from producer.engines.served.sglang_calls import SglangCalls
from tests.integration.engines.conftest import make_tokenizer, save_checkpoint
from tests.integration.engines.engine_process import HostedEngine
from tests.integration.engines.harness import Harness, request
from tests.unit.engines.recorded_sglang import SGLANG_REPLIES, RecordedSglang

PROMPT = (40, 41, 42)
PROBE = (40, 41, 319)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model"), 0, tied=False)


@pytest.fixture(scope="module")
def running(model, tokenizer, tmp_path_factory):
    """A server and its engine."""
    server = RecordedSglang(model, tokenizer)
    weights = tmp_path_factory.mktemp("weights")
    settings = {"model": str(model), "max_model_len": 256, "policy_version": -1, "weights_dir": str(weights)}
    engine = HostedEngine(server.url, settings)
    harness = Harness(engine, (model,))
    yield server, harness
    engine.shutdown()
    harness.sender.close()
    server.close()


@pytest.fixture
def server(running):
    server = running[0]
    server.asked.clear()
    return server


@pytest.fixture
def harness(running):
    return running[1]


def bodies(server, path):
    return [body for each, body in server.asked if each == path]


def test_a_sample_has_the_servers_tokens_log_probabilities_and_versions(harness):
    recorded = SGLANG_REPLIES["/generate"][1]
    version = harness.engine.version()
    for sample, answer in zip(harness.complete(PROMPT, num_samples=2, max_new_tokens=3), recorded, strict=True):
        assert sample.token_ids.tolist() == answer["output_ids"]
        expected = np.float32([token[0] for token in answer["meta_info"]["output_token_logprobs"]])
        np.testing.assert_array_equal(sample.logprobs, expected)
        assert (sample.policy_versions.tolist(), sample.finish_reason) == ([version] * 3, "length")


def test_under_top_k_the_log_probabilities_are_those_among_the_tokens_that_are_left(harness):
    samples = harness.complete(PROMPT, num_samples=2, top_k=6, top_p=0.9)
    for sample, answer in zip(samples, SGLANG_REPLIES["cut"][1], strict=True):
        meta = answer["meta_info"]
        assert sample.logprobs.tolist() == np.float32(meta["output_token_sampling_logprobs"]).tolist()
        assert (sample.logprobs > np.float32([token[0] for token in meta["output_token_logprobs"]])).all()


def test_each_sample_is_asked_for_with_an_id_and_a_seed_of_its_own(server, harness):
    harness.complete(PROMPT, num_samples=2, temperature=0.7, seed=9, stop=("x",), max_new_tokens=500)
    (body,) = bodies(server, "/generate")
    assert body["input_ids"] == [list(PROMPT)] * 2
    assert body["return_logprob"] is True and body["return_sampling_mask"] is False
    assert [params.pop("sampling_seed") for params in body["sampling_params"]] == [9, 10]
    assert body["sampling_params"][0] == {
        "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 253, "stop": ["x"],
        "json_schema": None,
    }  # fmt: skip
    first, second = body["rid"]
    assert not second.startswith(first) and not first.startswith(second)


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"top_p": 0.9}, "with a top_k up to 4096 alone; set one"),
        ({"min_p": 0.1}, "with a top_k up to 4096 alone; set one"),
        ({"top_k": 4097}, "with a top_k up to 4096 alone; set one"),
        ({"repetition_penalty": 1.1}, "SGLang's leaves out the prompt's tokens"),
    ],
)
def test_sampling_whose_log_probabilities_it_does_not_tell_is_refused(server, harness, sampling, reason):
    assert reason in harness.generate(request("cut", PROMPT, **sampling))["cut"].error
    assert not bodies(server, "/generate")


def test_a_probe_has_the_servers_log_probabilities_of_the_prompt(harness):
    rows = SGLANG_REPLIES["prompt_logprobs"][1]["meta_info"]["input_token_logprobs"]
    assert rows[2][1] == 0, "SGLang's name of the last token of the vocabulary"
    found = harness.engine.probe(PROBE, timeout_s=10.0).logprobs
    assert found.tolist() == np.float32([rows[1][0], rows[2][0]]).tolist()


def test_min_p_is_refused_by_a_server_with_seeds_which_it_would_end(server):
    asker = Server(server.url)
    with pytest.raises(RequestRefusedError, match="start it without --enable-deterministic-inference"):
        SglangCalls(asker, has_seeds=True).generate_body(
            request("a", PROMPT, min_p=0.1, top_k=5), "a", max_new_tokens=1
        )
    asker.close()


def test_an_aborted_request_has_its_tokens_so_far(server, harness, monkeypatch):
    monkeypatch.setitem(server.replies, "/generate", SGLANG_REPLIES["aborted"])
    monkeypatch.setattr(server, "holds", threading.Event())
    harness.engine.submit(request("long", PROMPT, num_samples=2))
    threading.Timer(0.1, server.holds.set).start()
    harness.engine.abort("long")
    samples = harness.engine.result("long", 10.0).completions
    for sample, answer in zip(samples, SGLANG_REPLIES["aborted"][1], strict=True):
        assert (sample.token_ids.tolist(), sample.finish_reason) == (answer["output_ids"], "abort")
    (asked,) = bodies(server, "/generate")
    assert {body["rid"] for body in bodies(server, "/abort_request")} == {*asked["rid"]}


def test_an_update_is_loaded_while_paused_under_the_name_that_its_tokens_then_have(server, harness):
    version = harness.sync(0)
    steps = [path for path, _ in server.asked if path != "/ping"]
    assert steps == ["/pause_generation", "/update_weights_from_disk", "/weights_checker", "/continue_generation"]
    (update,) = bodies(server, "/update_weights_from_disk")
    assert update["flush_cache"] is True and update["weight_version"].endswith(f"/{version}")
    for name, tensor in harness.weights(0):
        assert hashlib.sha256(server.loaded[name].numpy()).digest() == hashlib.sha256(tensor.numpy()).digest()
    assert {*harness.complete(PROMPT)[0].policy_versions.tolist()} == {version}


# ---- identity ----


@pytest.fixture
def refusal(running, model, tokenizer, monkeypatch):
    """Why a server is refused, one of whose recorded replies is changed."""
    server = running[0]

    def refusal(name, change):
        changed = {name: [200, {**server.replies[name][1], **change}]}
        monkeypatch.setattr(server, "replies", {**server.replies, **changed})
        asker = Server(server.url)
        with pytest.raises(ConfigError) as caught:
            check_server(asker, model, dtype="float32", max_model_len=256, timeout_s=5.0, tokenizer=tokenizer)
        asker.close()
        return str(caught.value)

    return refusal


def test_a_server_with_other_settings_is_refused_with_the_remedies(refusal):
    other = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2", "max_req_input_len": 255, "quantization": "fp8"}
    found = refusal("/server_info", other)
    for remedy in (
        "it computes in bfloat16, the run in float32; start it with --dtype float32",
        "it keeps keys and values in fp8_e5m2",
        "start it with --context-length 264 or more",
        "it has quantization 'fp8'",
    ):
        assert remedy in found


def test_a_server_that_does_not_say_what_it_is_is_refused_with_the_version(refusal):
    assert "use SGLang 0.5.23" in refusal("/server_info", {"tp_size": None})


@pytest.mark.parametrize(
    ("highest", "second", "reason"),
    [
        (-math.log(512), -math.log(512), "its vocabulary has 512 tokens, not 320"),
        (-1.5, -2.5, "its log-probabilities are of temperature 1"),
    ],
)
def test_one_token_tells_the_vocabulary_and_whether_log_probabilities_are_after_temperature(
    refusal, highest, second, reason
):
    tops = {"output_top_logprobs": [[[highest, 5, None], [second, 6, None]]]}
    assert reason in refusal("even", {"meta_info": tops})


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [(".layers.1.", "layers differ, such as"), ("lm_head.", "it has no output head of its own")],
)
def test_a_server_of_other_parameters_is_refused(refusal, running, left_out, reason):
    (rank,) = running[0].replies["/weights_checker"][1]["ranks"]
    names = {name: digest for name, digest in rank["checksums"].items() if left_out not in name}
    assert reason in refusal("/weights_checker", {"ranks": [{"checksums": names}]})


# ---- what ends the engine, last ----


def test_a_server_that_has_not_taken_the_weights_is_refused_by_name(running, monkeypatch):
    server, harness = running
    version = harness.next_version()
    weights = [(name, tensor * 2) for name, tensor in harness.weights(0)]
    monkeypatch.setattr(harness, "weights", lambda checkpoint: weights)
    harness.stage_checkpoint(0)
    monkeypatch.setattr(server, "ignores_updates", True)
    with pytest.raises(EngineError, match=f"{server.url} has stale weights: it was told to load version {version}"):
        harness.engine.commit_weights(version, in_flight=False, timeout_s=20.0)
