"""Test off-policy weights: w = 1/4, 1, 3/2 and 8 by hand, any tokens against the oracle."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from coati_rl.algorithms.choices import Correction
from coati_rl.algorithms.off_policy import correction_weights
from tests.examples import examples
from tests.unit.algorithms.batches import any_samples, lay_out
from tests.unit.algorithms.oracle import Sample, correction

W = torch.tensor([[0.25, 1.0, 1.5, 8.0]], dtype=torch.float64)
ALL = torch.ones(1, 4, dtype=torch.bool)
ONE_SAMPLE = torch.zeros(1, 4, dtype=torch.int32)
TWO_SAMPLES = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)


def weights_of(name: str, low: float, high: float, samples: Tensor = ONE_SAMPLE, mask: Tensor = ALL) -> list[float]:
    logprobs = torch.full((1, 4), -1.0, dtype=torch.float64)
    bounds = {"low": low, "high": high}
    return correction_weights(logprobs + W.log(), logprobs, mask, samples, correction=name, **bounds)[0].tolist()


@pytest.mark.parametrize(
    ("name", "low", "high", "expected"),
    [
        ("none", 0.0, 2.0, [1, 1, 1, 1]),
        ("tis", 0.0, 2.0, [0.25, 1, 1.5, 2]),  # one-sided
        ("tis", 0.5, 5.0, [0.5, 1, 1.5, 5]),  # two-sided
        ("icepop", 0.5, 5.0, [0, 1, 1.5, 0]),
        ("icepop", 0.1, 9.0, [0.25, 1, 1.5, 8]),
        ("sequence_mask", 0.5, 2.0, [1, 1, 1, 1]),  # (1/4 * 1 * 3/2 * 8)^(1/4) = 3^(1/4) = 1.32
        ("sequence_mask", 0.5, 1.3, [0, 0, 0, 0]),
        ("sequence_mask_tis", 0.5, 2.0, [0.25, 1, 1.5, 8]),  # OpenRLHF's seq-mask-tis: w as it is
        ("sequence_mask_tis", 0.5, 1.3, [0, 0, 0, 0]),
    ],
)
def test_value_by_hand(name: str, low: float, high: float, expected: list[float]) -> None:
    assert weights_of(name, low, high) == pytest.approx(expected, rel=1e-14)


def test_value_a_sequence_is_dropped_alone_where_two_share_a_row() -> None:
    # sqrt(1/4 * 1) = 1/2, just inside [0.49, 2]; sqrt(3/2 * 8) = 3.46, outside
    assert weights_of("sequence_mask", 0.49, 2.0, TWO_SAMPLES) == [1, 1, 0, 0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("tis", 0.0, 2.0),
        ("tis", 0.5, 5.0),
        ("icepop", 0.5, 5.0),
        ("sequence_mask", 0.5, 2.0),
        ("sequence_mask_tis", 0.5, 2.0),
    ],
)
@examples(60)
@given(samples=any_samples(), seed=st.integers(0, 1000))
def test_value_of_any_tokens_is_the_formulas(
    name: str, low: float, high: float, samples: list[Sample], seed: int
) -> None:
    gaps = [sample.old_logprobs - sample.rollout_logprobs for sample in samples]
    near = [abs(g - math.log(bound)) for gap in gaps for g in (*gap, gap.mean()) for bound in (low, high) if bound]
    assume(min(near) > 1e-9)
    batch = lay_out(samples, seed=seed)
    names = ("old_logprobs", "rollout_logprobs", "loss_mask", "sample_index")
    arrays = (batch.arrays[key] for key in names)
    found = correction_weights(*arrays, correction=name, low=low, high=high)
    assert (found[~batch.arrays["loss_mask"]] == 1).all()
    for got, sample in zip(batch.per_sample(found), samples, strict=True):
        np.testing.assert_allclose(got, correction(sample, name, low, high), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("name", get_args(Correction))
def test_gradient_weights_carry_none(name: str) -> None:
    old_logprobs = torch.zeros(1, 4, requires_grad=True)
    found = correction_weights(old_logprobs, W.log(), ALL, ONE_SAMPLE, correction=name, low=0.0, high=2.0)
    assert not found.requires_grad


@pytest.mark.parametrize("name", ["tis", "icepop", "sequence_mask", "sequence_mask_tis"])
def test_mask_what_is_not_counted_has_the_weight_1_and_no_influence(name: str) -> None:
    mask = torch.tensor([[False, True, True, False]])
    for poison in (math.nan, -math.inf, math.inf):
        old = torch.tensor([[poison, 0.0, math.log(1.5), poison]], dtype=torch.float64)
        found = correction_weights(
            old, torch.zeros(1, 4, dtype=torch.float64), mask, ONE_SAMPLE, correction=name, low=0.5, high=2.0
        )
        expected = [1, 1, 1, 1] if name == "sequence_mask" else [1, 1, 1.5, 1]
        assert found[0].tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("name", "expected"), [("tis", 2.0), ("icepop", 0.0), ("sequence_mask", 0.0), ("sequence_mask_tis", 0.0)]
)
def test_mask_what_is_not_counted_has_the_weight_1_even_if_the_band_does_not_hold_it(
    name: str, expected: float
) -> None:
    mask = torch.tensor([[False, True, True, False]])
    zeros = torch.zeros(1, 4)
    found = correction_weights(zeros, zeros, mask, ONE_SAMPLE, correction=name, low=2.0, high=3.0)
    assert found[0].tolist() == [1.0, expected, expected, 1.0]


@pytest.mark.parametrize("name", ["tis", "icepop"])
def test_split_tokens_one_by_one_have_the_weights_of_the_whole(name: str) -> None:
    alone = [correction_weights(W[:, t : t + 1].log(), torch.zeros(1, 1), ALL[:, :1], ONE_SAMPLE[:, :1],
                                correction=name, low=0.5, high=5.0).item() for t in range(4)]  # fmt: skip
    assert weights_of(name, 0.5, 5.0) == pytest.approx(alone, rel=1e-14)


def test_split_samples_one_by_one_are_dropped_as_together() -> None:
    alone = []
    for at in (slice(0, 2), slice(2, 4)):
        arrays = (W[:, at].log(), torch.zeros(1, 2), ALL[:, at], TWO_SAMPLES[:, at])
        alone += correction_weights(*arrays, correction="sequence_mask", low=0.49, high=2.0)[0].tolist()
    assert weights_of("sequence_mask", 0.49, 2.0, TWO_SAMPLES) == alone


@pytest.mark.parametrize(("low", "high"), [(2.0, 0.5), (1.0, 1.0), (-0.1, 2.0), (math.nan, 2.0)])
def test_refusal_of_bounds_that_are_not_in_order(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=rf"off-policy bounds \[{low}, {high}\] must be in order and not negative"):
        weights_of("tis", low, high)


def test_refusal_of_an_unknown_correction_and_of_shapes_that_differ() -> None:
    with pytest.raises(ValueError, match="off-policy correction 'mis' is unknown; use none, tis, icepop"):
        weights_of("mis", 0.5, 2.0)
    with pytest.raises(ValueError, match="must have one shape"):
        correction_weights(torch.zeros(1, 3), W, ALL, ONE_SAMPLE, correction="tis", low=0.0, high=2.0)
