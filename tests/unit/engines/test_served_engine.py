"""Test the engine of a server against replies recorded from vLLM's: tokens, weights, refusals, faults."""

import hashlib
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from coati_rl.errors import ConfigError, EngineError
from producer.engines.served import server as served_server
from producer.engines.served.identity import check_server
from producer.engines.served.server import Server
from tests.integration.engines.conftest import make_tokenizer, save_checkpoint
from tests.integration.engines.engine_process import HostedEngine
from tests.integration.engines.harness import Harness, request
from tests.unit.engines.recorded_server import REPLIES, RecordedServer

PROMPT = (40, 41, 42)
CHOICES = REPLIES["/inference/v1/generate"][1]["choices"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return tuple(save_checkpoint(root / f"{seed}", seed, tied=False) for seed in (0, 1))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def server(models, tokenizer):
    server = RecordedServer(models[0], tokenizer)
    yield server
    server.close()


@pytest.fixture
def harness(server, models, tmp_path):
    engine = HostedEngine(
        server.url, {"model": str(models[0]), "max_model_len": 256, "policy_version": -1, "weights_dir": str(tmp_path)}
    )
    harness = Harness(engine, ())
    yield harness
    engine.shutdown()
    harness.sender.close()


@pytest.fixture
def trained(harness, checkpoints_loaded):
    """The same with weights to send."""
    harness.models = checkpoints_loaded
    return harness


@pytest.fixture(scope="module")
def checkpoints_loaded(models):
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in models]


@pytest.fixture
def refusal(server, models, tokenizer):
    """Why a server is refused."""

    def refusal(max_model_len=256, dtype="float32"):
        asker = Server(server.url)
        with pytest.raises(ConfigError) as caught:
            check_server(asker, models[0], dtype=dtype, max_model_len=max_model_len, timeout_s=5.0, tokenizer=tokenizer)
        asker.close()
        return str(caught.value)

    return refusal


# ---- tokens ----


def test_a_sample_has_the_servers_tokens_log_probabilities_and_versions(harness):
    samples = harness.complete(PROMPT, num_samples=2, max_new_tokens=3)
    for sample, choice in zip(samples, CHOICES, strict=True):
        assert sample.token_ids.tolist() == choice["token_ids"]
        expected = np.float32([token["logprob"] for token in choice["logprobs"]["content"]])
        np.testing.assert_array_equal(sample.logprobs, expected)
        assert sample.policy_versions.tolist() == [-1, -1, -1]


def test_a_request_says_all_that_sampling_depends_on(harness, server):
    harness.complete(PROMPT, temperature=0.7, top_k=5, seed=9, stop=("x",), max_new_tokens=500)
    body = next(body for path, body in reversed(server.asked) if path == "/inference/v1/generate")
    assert body["token_ids"] == list(PROMPT)
    assert body["sampling_params"] == {
        "n": 1, "temperature": 0.7, "top_p": 1.0, "top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0,
        "max_tokens": 253, "stop": ["x"], "seed": 9, "logprobs": 0, "detokenize": True,
        "include_stop_str_in_output": True,
    }  # fmt: skip


def test_a_probe_has_the_servers_log_probabilities_of_the_prompt(harness):
    found = harness.engine.probe(PROMPT, timeout_s=10.0).logprobs
    rows = REPLIES["prompt_logprobs"][1]["prompt_logprobs"]
    assert found.tolist() == np.float32([rows[1]["41"]["logprob"], rows[2]["42"]["logprob"]]).tolist()


def test_a_request_that_the_server_refuses_is_a_result_with_an_error(harness, server):
    server.replies["/inference/v1/generate"] = REPLIES["refused"]
    result = harness.generate(request("bad", PROMPT))["bad"]
    assert "out of vocabulary" in result.error
    server.replies["/inference/v1/generate"] = REPLIES["/inference/v1/generate"]
    assert harness.complete(PROMPT, max_new_tokens=3)


def test_an_abort_is_sent_until_the_request_is_answered(harness, server):
    server.holds = threading.Event()
    harness.engine.submit(request("long", PROMPT))
    threading.Timer(0.3, server.holds.set).start()
    harness.engine.abort("long")
    assert len(harness.engine.result("long", 10.0).completions) == 1
    sent = next(
        body["request_id"] for path, body in server.asked if path.endswith("/generate") and "request_id" in body
    )
    aborts = [body for path, body in server.asked if path == "/inference/v1/abort_requests"]
    assert len(aborts) > 1 and aborts[0] == {"request_ids": [f"generate-tokens-{sent}"]}


def test_a_server_that_a_killed_run_has_left_paused_is_asked_and_samples(server, models, tokenizer, harness):
    server.answer("/pause", None)
    asker = Server(server.url)
    check_server(asker, models[0], dtype="float32", max_model_len=256, timeout_s=5.0, tokenizer=tokenizer)
    asker.close()
    assert harness.complete(PROMPT, max_new_tokens=3)


# ---- weights ----


def test_an_update_is_loaded_and_named_while_paused_then_proved_and_the_cache_is_reset(trained, server, tmp_path):
    server.asked.clear()
    assert trained.sync(1) == 0
    steps = [path for path in server.paths() if path != "/health"]
    assert steps == [
        "/pause", "/collective_rpc", "/update_weight_version", "/weight_checker", "/reset_prefix_cache", "/resume"
    ]  # fmt: skip
    for name, tensor in trained.weights(1):
        assert hashlib.sha256(server.loaded[name].numpy()).digest() == hashlib.sha256(tensor.numpy()).digest()
    assert trained.complete(PROMPT, max_new_tokens=3)[0].policy_versions.tolist() == [0, 0, 0]
    assert not [*tmp_path.rglob("*.safetensors")], "removed"


def test_a_server_that_has_not_taken_the_weights_is_refused_by_name(trained, server):
    server.ignores_updates = True
    version = trained.stage_checkpoint(1)
    with pytest.raises(EngineError, match=f"{server.url} has stale weights: it was told to load version {version}"):
        trained.engine.commit_weights(version, in_flight=False, timeout_s=20.0)
    with pytest.raises(EngineError, match="stale weights"):
        trained.complete(PROMPT)  # nothing is sampled with them


def test_a_server_that_cannot_read_the_file_is_refused_with_the_path(trained, server):
    server.replies["reload_weights"] = REPLIES["reload_failed"]
    version = trained.stage_checkpoint(1)
    with pytest.raises(EngineError, match=r"has not loaded version 0 from .*version-0, which it must reach"):
        trained.engine.commit_weights(version, in_flight=False, timeout_s=20.0)


def test_tokens_of_weights_that_this_run_has_not_sent_end_the_engine(harness, server):
    server.version = "coati-another/3"
    with pytest.raises(EngineError, match="another program uses the server, or it was started again"):
        harness.complete(PROMPT)


# ---- faults ----


def test_a_server_that_does_not_answer_is_lost_within_its_deadline(monkeypatch, server, models, tmp_path):
    monkeypatch.setattr(served_server, "LOST_AFTER_S", 0.5)
    monkeypatch.setattr(served_server, "_WATCH_S", 0.1)
    settings = {"model": str(models[0]), "max_model_len": 256, "weights_dir": str(tmp_path)}
    engine = HostedEngine(server.url, settings)
    server.holds = threading.Event()
    engine.submit(request("waits", PROMPT))
    server.replies["/health"] = [503, None]
    with pytest.raises(EngineError, match=f"the server {server.url} is lost: status 503"):
        engine.result("waits", 10.0)
    server.holds.set()
    engine.shutdown()


def test_a_server_that_is_lost_in_a_commit_ends_it_within_the_same_deadline(monkeypatch, server, trained):
    monkeypatch.setattr(served_server, "LOST_AFTER_S", 0.5)
    version = trained.stage_checkpoint(1)
    server.replies["/pause"] = server.replies["/health"] = [503, None]
    with pytest.raises(EngineError, match=f"{server.url} has not loaded version {version}"):
        trained.engine.commit_weights(version, in_flight=False, timeout_s=20.0)
    with pytest.raises(EngineError, match=f"the server {server.url} is lost: status 503"):
        trained.complete(PROMPT)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda choice: choice["logprobs"]["content"][0].update(logprob=-9999.0), "without a log-probability"),
        (lambda choice: choice["logprobs"]["content"].pop(), "of other tokens than those of the sample"),
        (lambda choice: choice.pop("logprobs"), "a reply without tokens and log-probabilities"),
        (lambda choice: choice["weight_versions"].clear(), "weight versions that are not of all tokens"),
        (lambda choice: choice.update(index=3), "1 samples in place of 1"),
    ],
)
def test_a_reply_that_does_not_fit_ends_the_engine(harness, server, change, reason):
    change(server.replies["/inference/v1/generate"][1]["choices"][0])
    with pytest.raises(EngineError, match=reason):
        harness.complete(PROMPT)


def test_a_redirect_is_not_followed(server, refusal):
    server.replies["/server_info"] = [307, None]
    assert "it does not say what it is (status 307: a redirect" in refusal()


# ---- identity ----


def test_a_server_of_the_runs_model_is_taken(server, models, tokenizer):
    asker = Server(server.url)
    facts = check_server(asker, models[0], dtype="float32", max_model_len=256, timeout_s=5.0, tokenizer=tokenizer)
    asker.close()
    assert (facts.num_ranks, facts.has_loader) == (1, False)


def test_a_server_with_other_settings_is_refused_with_the_remedies(server, refusal):
    settings = server.replies["/server_info"][1]["vllm_config"]
    settings["model_config"] |= {
        "logprobs_mode": "raw_logprobs", "dtype": "torch.bfloat16", "max_model_len": 128, "quantization": "fp8"
    }  # fmt: skip
    settings["scheduler_config"]["enable_chunked_prefill"] = True
    settings["cache_config"] = {"cache_dtype": "fp8_e4m3"}
    found = refusal()
    for remedy in (
        "start it with --logprobs-mode processed_logprobs",
        "it computes in bfloat16, the run in float32",
        "its sequences have 128 tokens at most, those of the run 256",
        "its weights are quantized (fp8)",
        "start it with --no-enable-chunked-prefill",
        "it keeps keys and values in fp8_e4m3; start it without --kv-cache-dtype",
    ):
        assert remedy in found


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("LogitsProcessor(vocab_size=320", "LogitsProcessor(vocab_size=512", "its vocabulary has 512 tokens, not 320"),
        (
            "(o_proj): RowParallelLinear(in_features=128",
            "(o_proj): RowParallelLinear(in_features=64",
            "o_proj is 64 x 64",
        ),
    ],
)
def test_a_server_with_another_model_is_refused(server, refusal, before, after, reason):
    text = server.replies["inspection"][1]["results"][0]
    assert before in text
    server.replies["inspection"][1]["results"][0] = text.replace(before, after)
    assert "it serves another model than" in (found := refusal()) and reason in found


def test_a_server_with_fewer_layers_is_refused(server, refusal):
    recorded = server.replies["/weight_checker"][1]["checksums"]
    server.replies["/weight_checker"][1]["checksums"] = {k: v for k, v in recorded.items() if ".layers.1." not in k}
    assert "it serves another model than" in (found := refusal()) and "layers.1." in found


def test_a_server_with_another_tokenizer_is_refused(server, refusal):
    server.tokenizer = lambda text, **_: {"input_ids": [1, 2]}
    assert "its tokenizer is not that of" in refusal()


def test_a_server_without_its_development_endpoints_is_refused_with_the_variable(server, refusal):
    server.replies["/server_info"] = [404, {"detail": "Not Found"}]
    assert "start vLLM's server with the environment variable VLLM_SERVER_DEV_MODE=1" in refusal()


def test_no_server_at_an_address_is_a_refusal(models, tokenizer):
    asker = Server("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"-b http://127\.0\.0\.1:9: no server answers there"):
        check_server(asker, models[0], dtype="float32", max_model_len=256, timeout_s=0.5, tokenizer=tokenizer)
    asker.close()
