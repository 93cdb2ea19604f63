"""Test vLLM over two ranks on the CPU: both are updated, and neither outlives the engine's process."""

import os
import signal
import time

import psutil
import pytest

from coati_rl.errors import EngineError
from tests.ended import has_ended
from tests.integration.engines.engine_process import hosted_engine
from tests.integration.engines.harness import MAX_MODEL_LEN, TIMEOUT_S, Harness, request

PROMPT = tuple(range(40, 60))
pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=["tied", "untied"])
def harness(request, checkpoints):
    models = checkpoints[request.param]
    with hosted_engine(
        "vllm", model=str(models[0]), tensor_parallel_size=2, max_model_len=MAX_MODEL_LEN, max_num_seqs=16
    ) as engine:
        harness = Harness(engine, models, num_ranks=2)
        yield harness
        harness.sender.close()


def test_both_ranks_receive_the_same_digest_and_serve_the_new_weights(harness):
    for checkpoint in (1, 0, 1):
        version = harness.stage_checkpoint(checkpoint)  # compares both digests with the sender's
        harness.commit(version, checkpoint)
        for sample in harness.complete(PROMPT, num_samples=4, temperature=0.7, seed=3):
            assert sample.policy_versions.tolist() == [version] * len(sample.token_ids)
            assert harness.logprob_gap(PROMPT, sample, temperature=0.7) < 1e-4


def test_both_ranks_change_to_the_new_weights_under_running_requests(harness):
    first = harness.engine.version()
    prompts = {f"request {i}": tuple(range(40 + i, 60 + i)) for i in range(6)}
    for i, (name, prompt) in enumerate(prompts.items()):
        harness.engine.submit(request(name, prompt, num_samples=4, max_new_tokens=100, temperature=0.7, seed=10 * i))
    versions = [harness.sync(1 - harness.serving, in_flight=True) for _ in range(2)]
    results = [harness.engine.result(name, TIMEOUT_S) for name in prompts]
    assert versions == [first + 1, first + 2]
    samples = [(prompts[result.request_id], sample) for result in results for sample in result.completions]
    for prompt, sample in samples:
        assert set(sample.policy_versions.tolist()) <= {first, *versions}
        assert max(harness.logprob_gap_by_version(prompt, sample, temperature=0.7).values()) < 1e-4
    assert any(len(set(sample.policy_versions.tolist())) > 1 for _, sample in samples)


def test_a_probe_is_answered_over_two_ranks(harness):
    for _ in range(2):
        harness.sync(1 - harness.serving)
        assert harness.probe_gap(PROMPT) < 1e-4


def test_seeds_and_greedy_hold_over_two_ranks(harness):
    first = harness.complete(PROMPT, num_samples=2, seed=9)
    again = harness.complete(PROMPT, num_samples=2, seed=9)
    assert [sample.token_ids.tolist() for sample in first] == [sample.token_ids.tolist() for sample in again]
    (greedy,) = harness.complete(PROMPT, temperature=0.0)
    assert greedy.token_ids.tolist() == harness.logits(PROMPT, greedy).argmax(-1).tolist()


def test_last_a_worker_that_dies_ends_the_engine_and_the_killed_engine_leaves_no_process(harness):
    """Last, as it ends the engine of the tests above."""
    engine = harness.engine
    engine_pid, children = engine.process_ids()
    workers = [psutil.Process(pid) for pid in children]
    named = [worker for worker in workers if "VLLM" in worker.name() or "spawn_main" in " ".join(worker.cmdline())]
    assert len(named) >= 2
    engine.submit(request("running", PROMPT, num_samples=64, max_new_tokens=200))
    os.kill(named[-1].pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="died"):
        engine.result("running", 60.0)
    os.kill(engine_pid, signal.SIGKILL)
    end = time.monotonic() + 60.0
    while not all(has_ended(worker) for worker in workers):
        assert time.monotonic() < end, f"left behind: {workers}"
        time.sleep(0.05)
