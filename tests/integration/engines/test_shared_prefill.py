"""Test that vLLM computes a prompt once for all samples of a group, but for what no whole block of its cache holds."""

import pytest

from tests.integration.engines.conftest import ENGINES

BLOCK_SIZE = 32  # the default on the CPU


@pytest.mark.parametrize("harness", ENGINES[:1], indirect=True)
@pytest.mark.parametrize("num_tokens", [33, 100])
def test_the_samples_of_a_group_share_whole_blocks_of_their_prompt(harness, num_tokens):
    prompt = [2 + (3 * place + num_tokens) % 300 for place in range(num_tokens)]
    before = harness.engine.num_computed()
    harness.complete(prompt, num_samples=8, max_new_tokens=1)
    rest = num_tokens - (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert harness.engine.num_computed() - before == num_tokens + 7 * rest
