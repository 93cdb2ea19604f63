"""Test weights and scales: three samples of 1, 2 and 5 tokens by hand, any samples against the oracle."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.algorithms.aggregation import loss_scale, token_weight
from tests.examples import examples
from tests.unit.algorithms.oracle import aggregated

MODES = ("sample_level", "token_level", "constant")
TERMS = [[6.0], [1.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0]]  # of three samples
TERM = st.floats(-100, 100)


def summed(samples: list[list[float]], mode: str, max_length: int) -> float:
    """Weighted, not yet scaled: what accumulates over micro-batches."""
    return math.fsum(
        token_weight(len(terms), mode, max_length=max_length) * term for terms in samples for term in terms
    )


def aggregate(samples: list[list[float]], mode: str, max_length: int = 10) -> float:
    return summed(samples, mode, max_length) * loss_scale(len(samples), sum(map(len, samples)), mode)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sample_level", (6 + 2 + 1) / 3),  # mean of the samples' means
        ("token_level", (6 + 4 + 5) / 8),  # mean over all tokens
        ("constant", (6 + 4 + 5) / 10 / 3),  # each sample's sum by L_max = 10
    ],
)
def test_value_of_three_samples(mode: str, expected: float) -> None:
    assert aggregate(TERMS, mode) == pytest.approx(expected, rel=1e-15)


@examples(150)
@pytest.mark.parametrize("mode", MODES)
@given(samples=st.lists(st.lists(TERM, min_size=1, max_size=6), min_size=1, max_size=6), max_length=st.integers(6, 100))
def test_value_of_any_samples_is_the_formulas(mode: str, samples: list[list[float]], max_length: int) -> None:
    expected = aggregated(samples, mode, max_length)
    assert aggregate(samples, mode, max_length) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_a_term_counts_with_its_weight_times_the_scale(mode: str) -> None:
    # d loss / d term of the second of two tokens: 1 / 2 / 3, 1 / 8, 1 / 10 / 3
    moved = [[6.0], [1.0, 4.0], TERMS[2]]
    expected = {"sample_level": 1 / 6, "token_level": 1 / 8, "constant": 1 / 30}[mode]
    assert aggregate(moved, mode) - aggregate(TERMS, mode) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_mask_a_token_masked_later_keeps_its_share_of_the_denominator(mode: str) -> None:
    # A dropped token counts 0, but still as one of two, one of eight, one of three samples'.
    expected = {"sample_level": (6 + 0.5 + 1) / 3, "token_level": (6 + 1 + 5) / 8, "constant": (6 + 1 + 5) / 10 / 3}
    assert aggregate([[6.0], [1.0, 0.0], TERMS[2]], mode) == pytest.approx(expected[mode], rel=1e-15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [1, 2])
def test_split_sums_of_parts_add_up_before_the_scale_is_known(mode: str, cut: int) -> None:
    parts = summed(TERMS[:cut], mode, 10) + summed(TERMS[cut:], mode, 10)
    assert parts * loss_scale(3, 8, mode) == pytest.approx(aggregate(TERMS, mode), rel=1e-15)


@pytest.mark.parametrize("mode", MODES)
def test_a_response_of_one_token_weighs_as_the_mode_says(mode: str) -> None:
    weights = {"sample_level": 1.0, "token_level": 1.0, "constant": 0.1}
    assert token_weight(1, mode, max_length=10) == weights[mode]


@pytest.mark.parametrize("length", [0, -1])
@pytest.mark.parametrize("mode", MODES)
def test_refusal_of_a_sample_without_tokens(mode: str, length: int) -> None:
    with pytest.raises(ValueError, match=f"length = {length} must be positive"):
        token_weight(length, mode, max_length=10)


@pytest.mark.parametrize("max_length", [0, -3])
def test_refusal_of_a_maximum_that_holds_nothing(max_length: int) -> None:
    with pytest.raises(ValueError, match=f"max_length = {max_length} must be positive"):
        token_weight(1, "constant", max_length=max_length)


@pytest.mark.parametrize(("mode", "name"), [*zip(MODES, ("num_samples", "num_tokens", "num_samples"), strict=True)])
def test_refusal_of_an_empty_batch(mode: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0 must be positive at {mode}"):
        loss_scale(*{"num_samples": (0, 5), "num_tokens": (5, 0)}[name], mode)


def test_refusal_of_an_unknown_variation_by_name() -> None:
    with pytest.raises(ValueError, match="'batch_level' is unknown; use one of sample_level, token_level, constant"):
        token_weight(1, "batch_level", max_length=10)
    with pytest.raises(ValueError, match="'batch_level' is unknown"):
        loss_scale(1, 1, "batch_level")
