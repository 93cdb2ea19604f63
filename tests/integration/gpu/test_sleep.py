"""Test engines on GPUs that give their memory up in the trainers' turn, and serve what is committed after it."""

import pytest

from coati_rl.transport.wire import WeightSender
from tests.integration.engines.engine_process import hosted_engine
from tests.integration.engines.harness import MAX_MODEL_LEN, Harness

PROMPT = tuple(range(40, 60))
GAP = 2e-4  # nats, float32
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_after_a_sleep_an_engine_serves_the_weights_that_are_committed(checkpoints, backend):
    options = {"gpu_memory_utilization": 0.3, "enforce_eager": True} if backend == "vllm" else {}
    with hosted_engine(
        backend,
        model=str(checkpoints["untied"][0]),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        device="cuda",
        takes_turns=True,
        **options,
    ) as engine:
        harness = Harness(engine, checkpoints["untied"], sender=WeightSender())
        before = harness.complete(PROMPT, num_samples=2, max_new_tokens=6, temperature=0.7, seed=5)
        used = engine.gpu_bytes()
        for checkpoint in (1, 0):
            harness.put_to_sleep()
            assert engine.gpu_bytes() < used / 2
            harness.sync(checkpoint)
            assert engine.gpu_bytes() > 0.9 * used
            (sample,) = harness.complete(PROMPT, max_new_tokens=6, temperature=0.7, seed=1)
            assert harness.logprob_gap(PROMPT, sample, temperature=0.7) < GAP
            assert harness.probe_gap(PROMPT) < GAP
        after = harness.complete(PROMPT, num_samples=2, max_new_tokens=6, temperature=0.7, seed=5)
        assert [each.token_ids.tolist() for each in after] == [each.token_ids.tolist() for each in before]
        harness.sender.close()
