"""Test vLLM on GPUs: what it samples, and updates over NCCL, by one rank and by two.

A real GPU has torch.compile and CUDA graphs. With one GPU the sender has the engine's, and NCCL takes it for another
host.
"""

import os

import numpy as np
import pytest
import torch
from bench.weight_sync import nccl_environment

from coati_rl.transport.wire import WeightSender
from tests.gpu.devices import IS_EMULATED
from tests.integration.engines.engine_process import hosted_engine
from tests.integration.engines.harness import MAX_MODEL_LEN, Harness, request

PROMPT = tuple(range(40, 60))
GAP = 2e-4  # nats, float32
pytestmark = [pytest.mark.gpu, pytest.mark.full]


def sender_gpu():
    """The machine's last."""
    return torch.device("cuda", torch.cuda.device_count() - 1)


@pytest.fixture(scope="module", params=[1, 2], ids=["ptp1", "ptp2"])
def harness(request, checkpoints):
    if request.param > torch.cuda.device_count():
        pytest.skip("an engine of two ranks needs two GPUs")
    with hosted_engine(
        "vllm",
        model=str(checkpoints["untied"][0]),
        tensor_parallel_size=request.param,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        device="cuda",
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=2**22,
        enforce_eager=IS_EMULATED,
        engine_args={"disable_custom_all_reduce": True} if IS_EMULATED else {},  # whose kernel is not emulated
    ) as engine:
        os.environ |= nccl_environment(0)
        sender = WeightSender(backend="nccl", device=sender_gpu())
        harness = Harness(engine, checkpoints["untied"], num_ranks=request.param, sender=sender)
        yield harness
        sender.close()


def on_gpu(self, checkpoint):
    """Of a checkpoint, on the sender's GPU."""
    return [(name, parameter.data.to(sender_gpu())) for name, parameter in self.models[checkpoint].named_parameters()]


@pytest.fixture(autouse=True)
def weights_on_a_gpu(monkeypatch):
    monkeypatch.setattr(Harness, "weights", on_gpu)


def test_samples_have_the_log_probabilities_of_transformers_and_seeds_hold(harness):
    first, again = (
        harness.complete(PROMPT, num_samples=2, max_new_tokens=6, temperature=0.7, seed=5) for _ in range(2)
    )
    for sample, same in zip(first, again, strict=True):
        assert harness.logprob_gap(PROMPT, sample, temperature=0.7) < GAP
        assert np.array_equal(sample.token_ids, same.token_ids)
    (greedy,) = harness.complete(PROMPT, max_new_tokens=6, temperature=0.0)
    assert greedy.token_ids.tolist() == harness.logits(PROMPT, greedy).argmax(-1).tolist()


@pytest.mark.skipif(IS_EMULATED, reason="the Triton kernel that sorts is not emulated")
def test_under_top_k_and_top_p_log_probabilities_are_renormalised(harness):
    for sample in harness.complete(PROMPT, num_samples=4, temperature=0.8, top_k=6, top_p=0.7, seed=9):
        assert harness.kept_logprob_gap(PROMPT, sample, temperature=0.8, top_k=6, top_p=0.7) < GAP


def test_every_rank_receives_the_sent_bytes_and_serves_them_when_they_are_committed(harness):
    for checkpoint in (1, 0):
        old, version = harness.serving, harness.stage_checkpoint(checkpoint)  # compares digests with the sender's
        (before,) = harness.complete(PROMPT, max_new_tokens=4, temperature=0.7, seed=1)  # received and not committed
        assert harness.logprob_gap(PROMPT, before, temperature=0.7) < GAP
        assert harness.serving == old
        harness.commit(version, checkpoint)
        (after,) = harness.complete(PROMPT, max_new_tokens=4, temperature=0.7, seed=1)
        assert after.policy_versions.tolist() == [version] * len(after.token_ids)
        assert harness.logprob_gap(PROMPT, after, temperature=0.7) < GAP
        assert harness.probe_gap(PROMPT) < GAP


def test_running_requests_go_on_under_the_new_weights(harness):
    first = harness.engine.version()
    prompts = {f"request {i}": tuple(range(40 + i, 60 + i)) for i in range(2)}
    for i, (name, prompt) in enumerate(prompts.items()):
        harness.engine.submit(request(name, prompt, max_new_tokens=30, temperature=0.7, seed=10 * i))
    version = harness.sync(1 - harness.serving, in_flight=True)
    results = [harness.engine.result(name, 300.0) for name in prompts]
    samples = [(prompts[result.request_id], sample) for result in results for sample in result.completions]
    for prompt, sample in samples:
        assert set(sample.policy_versions.tolist()) <= {first, version}
        assert max(harness.logprob_gap_by_version(prompt, sample, temperature=0.7).values()) < GAP
    assert any(len(set(sample.policy_versions.tolist())) > 1 for _, sample in samples)
