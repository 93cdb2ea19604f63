"""Test log-ratios of tokens and samples: two samples in one row, one with a gap, NaN or inf in padding."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.algorithms.ratio import MAX_LOG_RATIO, count_samples, masked_log_ratio, ratio_of, sample_any, sample_mean
from tests.examples import examples
from tests.unit.algorithms.batches import lay_out, random_samples
from tests.unit.algorithms.oracle import log_ratios

# Sample 4: tokens 1 and 3 count; sample 9: one token; sample 2, in the next row: none.
SAMPLE_INDEX = torch.tensor([[4, 4, 4, 4, 9, 9, -1], [2, 2, -1, -1, -1, -1, -1]], dtype=torch.int32)
MASK = torch.tensor([[0, 1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
VALUES = torch.tensor([[0.0, 1.0, 0.0, 4.0, 0.0, -3.0, 0.0], [0.0] * 7])


def test_value_of_log_ratios_is_the_difference_where_the_mask_is_true() -> None:
    found = masked_log_ratio(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, 7.0]]), torch.tensor([[True, False]]))
    assert found.tolist() == [[0.5, 0.0]]


@pytest.mark.parametrize(
    ("log_ratio", "ratio", "slope"),
    [(0.0, 1.0, 1.0), (math.log(2), 2.0, 2.0), (-30.0, math.exp(-30), math.exp(-30)), (-1000.0, 0.0, 0.0),
     (19.0, math.exp(19), math.exp(19)), (1000.0, math.exp(MAX_LOG_RATIO), 0.0)],
)  # fmt: skip
def test_value_and_gradient_of_a_ratio_end_at_exp_20(log_ratio: float, ratio: float, slope: float) -> None:
    leaf = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    found = ratio_of(leaf)
    found.backward()
    assert found.item() == pytest.approx(ratio, rel=1e-15)
    assert leaf.grad.item() == pytest.approx(slope, rel=1e-15)


def test_value_the_mean_of_a_sample_stands_on_each_of_its_loss_tokens() -> None:
    found = sample_mean(VALUES, MASK, SAMPLE_INDEX)
    assert found.tolist() == [[0, 2.5, 0, 2.5, 0, -3, 0], [0] * 7]


def test_gradient_of_a_sample_mean_is_shared_among_its_tokens() -> None:
    values = VALUES.clone().requires_grad_()
    (sample_mean(values, MASK, SAMPLE_INDEX)[0] * torch.tensor([9.0, 1, 9, 2, 9, 5, 9])).sum().backward()
    # (1 + 2) / 2 on both tokens of the first sample, 5 / 1 on the other's
    assert values.grad[MASK].tolist() == [1.5, 1.5, 5.0]


@examples(120)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_value_of_any_layout_is_gspos_length_normalised_log_ratio(lengths: list[int], seed: int) -> None:
    samples = random_samples(lengths, seed=seed, spread=2.0)
    batch = lay_out(samples, seed=seed)
    mask = batch.arrays["loss_mask"]
    single = masked_log_ratio(batch.arrays["logprobs"], batch.arrays["old_logprobs"], mask)
    found = sample_mean(single, mask, batch.arrays["sample_index"])
    assert not found[~mask].any()
    for got, sample in zip(batch.per_sample(found), samples, strict=True):
        np.testing.assert_allclose(got, log_ratios(sample, "sequence")[0], rtol=1e-12, atol=1e-14)


def test_value_a_token_of_a_sample_marks_all_of_its_tokens_and_no_others() -> None:
    found = sample_any((VALUES == 4) & MASK, SAMPLE_INDEX)
    assert found[0].tolist() == [True] * 4 + [False] * 3
    assert not found[1].any()
    assert not sample_any(torch.zeros_like(MASK), SAMPLE_INDEX).any()


def test_value_only_samples_with_a_token_under_the_mask_are_counted() -> None:
    assert count_samples(MASK, SAMPLE_INDEX).item() == 2
    assert count_samples(torch.zeros_like(MASK), SAMPLE_INDEX).item() == 0


@pytest.mark.parametrize("poison", [math.nan, -math.inf, math.inf])
def test_mask_padding_reaches_neither_log_ratios_nor_their_gradient(poison: float) -> None:
    mask = torch.tensor([[True, False]])
    logprobs = torch.tensor([[-1.0, poison]], requires_grad=True)
    log_ratio = masked_log_ratio(logprobs, torch.tensor([[-1.5, poison]]), mask)
    ratio_of(log_ratio).sum().backward()
    assert log_ratio.tolist() == [[0.5, 0.0]]
    assert logprobs.grad[0, 1].item() == 0.0
    assert torch.isfinite(logprobs.grad).all()


def test_split_rows_give_the_same_means_and_marks_as_together() -> None:
    means, marks = sample_mean(VALUES, MASK, SAMPLE_INDEX), sample_any(MASK, SAMPLE_INDEX)
    for row in range(2):
        at = slice(row, row + 1)
        assert torch.equal(sample_mean(VALUES[at], MASK[at], SAMPLE_INDEX[at]), means[at])
        assert torch.equal(sample_any(MASK[at], SAMPLE_INDEX[at]), marks[at])


def test_refusal_of_shapes_that_differ() -> None:
    with pytest.raises(ValueError, match=r"must have one shape, not \[\(1, 2\), \(1, 3\), \(1, 2\)\]"):
        masked_log_ratio(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2, dtype=torch.bool))
