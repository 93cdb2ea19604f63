"""Test which requests an engine refuses before it begins with them."""

import pytest

from coati_rl.types import GenerationRequest, SamplingParams
from producer.engines.admission import RequestRefusedError, check_request


@pytest.mark.parametrize("seed", [None, 0, -(2**63), 2**63 - 3])
def test_a_seed_of_64_bits_is_taken_with_those_of_further_samples(seed):
    assert refusal(seed=seed) == ""


@pytest.mark.parametrize("seed", [2**70, 2**63 - 2, -(2**63) - 1])
def test_a_seed_that_is_too_large_for_a_generator_is_refused_and_not_the_end_of_an_engine(seed):
    assert refusal(seed=seed) == f"seed {seed}: must be an integer of 64 bits"


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": float("nan")}, "temperature nan, top_p 1.0, top_k None: need at least 0"),
        ({"temperature": float("inf")}, "temperature inf is above 2"),
        ({"temperature": 0.001}, "temperature 0.001 is below 0.01"),
        ({"repetition_penalty": float("nan")}, "min_p 0.0, repetition_penalty nan: need in [0, 1], and a finite"),
        ({"repetition_penalty": float("inf")}, "min_p 0.0, repetition_penalty inf: need in [0, 1], and a finite"),
        ({"stop": ("END", "")}, "stop: an empty text would end the response at its first token; leave it out"),
    ],
)
def test_sampling_that_has_no_distribution_or_ends_at_once_is_refused(sampling, message):
    assert refusal(**sampling).startswith(message)


def refusal(**sampling):
    """Why two samples, with a seed and the next one, are refused; empty if they are taken."""
    request = GenerationRequest(request_id="one", token_ids=(1,), num_samples=2, sampling=SamplingParams(**sampling))
    try:
        check_request(request, vocab_size=8, max_model_len=8)
    except RequestRefusedError as error:
        return str(error)
    return ""
