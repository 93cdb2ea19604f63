"""Test which requests an engine refuses before it begins with them."""

import pytest

from coati_rl.types import GenerationRequest, SamplingParams
from producer.engines.admission import RequestRefusedError, check_request


@pytest.mark.parametrize("seed", [None, 0, -(2**63), 2**63 - 3])
def test_a_seed_of_64_bits_is_taken_with_those_of_further_samples(seed):
    assert refusal(seed) == ""


@pytest.mark.parametrize("seed", [2**70, 2**63 - 2, -(2**63) - 1])
def test_a_seed_that_is_too_large_for_a_generator_is_refused_and_not_the_end_of_an_engine(seed):
    assert refusal(seed) == f"seed {seed}: must be an integer of 64 bits"


def refusal(seed):
    """Why two samples, with this seed and the next one, are refused; empty if they are taken."""
    sampling = SamplingParams(seed=seed)
    request = GenerationRequest(request_id="one", token_ids=(1,), num_samples=2, sampling=sampling)
    try:
        check_request(request, vocab_size=8, max_model_len=8)
    except RequestRefusedError as error:
        return str(error)
    return ""
