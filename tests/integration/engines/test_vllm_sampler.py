"""Test that drawing random numbers ahead in vLLM's CPU sampler changes no token and no log-probability."""

from functools import partial

import pytest

from tests.integration.engines.conftest import ENGINES
from tests.integration.engines.harness import Harness

NUM_STEPS, NUM_ROWS, VOCAB_SIZE = 130, 6, 50


def sampled(is_ahead: bool) -> list[tuple[list[int], list[list[float]]]]:
    """Tokens and log-probabilities of each step, of three cuts; run in the process of vLLM's engine."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from producer.engines.vllm_sampler import draw_ahead

    current_platform.import_kernels()
    sampler = TopKTopPSampler("processed_logprobs")
    if is_ahead:
        draw_ahead(sampler)
        assert sampler.forward != sampler.forward_cpu
    torch.manual_seed(0)
    generators = {row: torch.Generator().manual_seed(row) for row in range(NUM_ROWS)}
    cuts = [(None, None), (torch.full((NUM_ROWS,), 5), None), (None, torch.full((NUM_ROWS,), 0.7))]
    logits_of = torch.Generator().manual_seed(99)
    found = []
    for step in range(NUM_STEPS):
        logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=logits_of)
        tokens, logprobs = sampler(logits, generators, *cuts[step % len(cuts)])
        found.append((tokens.tolist(), logprobs.tolist()))
    return found


@pytest.mark.parametrize("harness", ENGINES[:1], indirect=True)
def test_tokens_and_logprobs_are_vllms_own(harness: Harness) -> None:
    ahead, own = (harness.engine.run(partial(sampled, is_ahead)) for is_ahead in (True, False))
    assert ahead == own
    assert len({tuple(tokens) for tokens, _ in own}) > NUM_STEPS / 2
