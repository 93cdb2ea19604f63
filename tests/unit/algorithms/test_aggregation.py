"""Weights and scales: three samples of 1, 2 and 5 tokens, summed by hand."""

import pytest

from coati_rl.algorithms.aggregation import loss_scale, token_weight

TERMS = [[6.0], [1.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0]]  # of three samples


def aggregate(mode: str) -> float:
    total = sum(token_weight(len(sample), mode) * term for sample in TERMS for term in sample)
    return total * loss_scale(3, 8, mode)


def test_at_sample_level_the_loss_is_the_mean_of_the_samples_means() -> None:
    assert aggregate("sample_level") == pytest.approx((6 + 2 + 1) / 3)


def test_at_token_level_the_loss_is_the_mean_over_all_tokens() -> None:
    assert aggregate("token_level") == pytest.approx((6 + 4 + 5) / 8)


def test_a_token_masked_later_keeps_its_share_of_the_denominator() -> None:
    # The second token of the second sample is dropped: its term counts 0, but still as one of two and one of eight.
    weight = token_weight(2, "sample_level")
    assert weight * 1.0 * loss_scale(1, 2, "sample_level") == pytest.approx(0.5)
    assert token_weight(2, "token_level") * 1.0 * loss_scale(1, 2, "token_level") == pytest.approx(0.5)


@pytest.mark.parametrize("length", [0, -1])
def test_a_sample_without_tokens_has_no_weight(length: int) -> None:
    with pytest.raises(ValueError, match=f"length = {length} must be positive"):
        token_weight(length, "sample_level")


def test_an_empty_batch_has_no_scale() -> None:
    with pytest.raises(ValueError, match="num_samples = 0 must be positive"):
        loss_scale(0, 5, "sample_level")
    with pytest.raises(ValueError, match="num_tokens = 0 must be positive"):
        loss_scale(5, 0, "token_level")


def test_an_unknown_variation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'batch_level' is unknown; use one of sample_level, token_level"):
        token_weight(1, "batch_level")
    with pytest.raises(ValueError, match="'batch_level' is unknown"):
        loss_scale(1, 1, "batch_level")
