"""Test PPO's clipped term and dual clip: ratios 1, 2 and 1/2 by hand, any tokens against the oracle."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from coati_rl.algorithms.policy_loss import clipped_policy_terms, clipped_tokens
from tests.examples import examples
from tests.unit.algorithms.oracle import clip_term, exp_ratio

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
RATIOS = torch.tensor([[1.0, 2.0, 2.0, 0.5, 0.5, 4.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[3.0, 1.0, -1.0, 1.0, -1.0, -2.0]], dtype=torch.float64)
ALL = torch.ones(1, 6, dtype=torch.bool)


def terms_and_gradient(log_ratio: Tensor, advantages: Tensor, mask: Tensor, **bounds: float) -> tuple[Tensor, Tensor]:
    leaf = log_ratio.clone().requires_grad_()
    terms = clipped_policy_terms(leaf, advantages, mask, **bounds)
    terms.sum().backward()
    return terms.detach(), leaf.grad


@pytest.mark.parametrize(
    ("dual", "terms", "gradient"),
    [
        # A = 1, r = 2: cut to 1.28, it may not win more. A = -1, r = 2: what got likelier although bad is not forgiven.
        # A = 1, r = 1/2: its gradient may bring it back. A = -1, r = 1/2: cut to 0.8, it may not lose less.
        (None, [-3, -1.28, 2, -0.5, 0.8, 8], [-3, 0, 2, -0.5, 0, 8]),
        # At most 3 * |A| where A < 0: 8 becomes 6 and stops.
        (3.0, [-3, -1.28, 2, -0.5, 0.8, 6], [-3, 0, 2, -0.5, 0, 0]),
    ],
)
def test_value_and_gradient_by_hand(dual: float | None, terms: list[float], gradient: list[float]) -> None:
    found, slope = terms_and_gradient(RATIOS.log(), ADVANTAGES, ALL, **BOUNDS, clip_dual=dual)
    assert found[0].tolist() == pytest.approx(terms, rel=1e-14)
    assert slope[0].tolist() == pytest.approx(gradient, rel=1e-14)
    stopped = clipped_tokens(RATIOS.log(), ADVANTAGES, ALL, **BOUNDS, clip_dual=dual)
    assert stopped[0].tolist() == [value == 0 for value in gradient]


TOKEN = st.tuples(st.floats(-3, 3) | st.sampled_from([0.0, 30.5, -30.5, 1000.0, -1000.0]), st.floats(-3, 3))


@examples(150)
@given(
    tokens=st.lists(TOKEN, min_size=1, max_size=6),
    low=st.sampled_from([3e-4, 0.2, 1.0]),
    high=st.sampled_from([4e-4, 0.28, 4.0]),
    dual=st.sampled_from([None, 6.0]),
)
def test_value_and_gradient_of_any_tokens_are_the_formulas(
    tokens: list[tuple[float, float]], low: float, high: float, dual: float | None
) -> None:
    bounds = [1 - low, 1 + high, dual or 1e9]
    assume(all(abs(exp_ratio(r)[0] - bound) > 1e-12 for r, _ in tokens for bound in bounds if bound > 0))
    log_ratio, advantages = torch.tensor(tokens, dtype=torch.float64).T[:, None]
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    found = terms_and_gradient(log_ratio, advantages, mask, clip_low=low, clip_high=high, clip_dual=dual)
    expected = [clip_term(r, a, low, high, dual) for r, a in tokens]
    for got, wanted in zip(found, zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(got[0].numpy(), wanted, rtol=1e-13, atol=1e-300)


def test_mask_padding_of_any_advantage_changes_neither_terms_nor_gradient() -> None:
    mask = torch.tensor([[True, False, True, True, False, False]])
    log_ratio = torch.where(mask, RATIOS.log(), 0.0)  # as masked_log_ratio gives it
    clean = terms_and_gradient(log_ratio, ADVANTAGES, mask, **BOUNDS, clip_dual=3.0)
    for poison in (math.inf, -math.inf, math.nan):
        advantages = torch.where(mask, ADVANTAGES, poison)
        found = terms_and_gradient(log_ratio, advantages, mask, **BOUNDS, clip_dual=3.0)
        assert all(torch.equal(got, wanted) for got, wanted in zip(found, clean, strict=True))
        assert not found[0][~mask].any()
        stopped = clipped_tokens(log_ratio, advantages, mask, **BOUNDS, clip_dual=3.0)
        assert not stopped[~mask].any()


def test_split_tokens_one_by_one_have_the_terms_and_gradients_of_the_whole() -> None:
    whole = terms_and_gradient(RATIOS.log(), ADVANTAGES, ALL, **BOUNDS, clip_dual=3.0)
    for t in range(6):
        at = (slice(None), slice(t, t + 1))
        part = terms_and_gradient(RATIOS[at].log(), ADVANTAGES[at], ALL[at], **BOUNDS, clip_dual=3.0)
        assert all(torch.equal(got, wanted[at]) for got, wanted in zip(part, whole, strict=True))


@pytest.mark.parametrize(("dual", "term"), [(None, 2 * math.exp(20)), (3.0, 6.0)])
def test_a_token_that_became_unboundedly_likely_gives_a_finite_term_and_no_gradient(
    dual: float | None, term: float
) -> None:
    log_ratio, advantage = torch.tensor([[1000.0]]), torch.tensor([[-2.0]])
    found, slope = terms_and_gradient(log_ratio, advantage, torch.tensor([[True]]), **BOUNDS, clip_dual=dual)
    assert found.item() == pytest.approx(term, rel=1e-6)
    assert slope.item() == 0.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_that_became_impossible_gives_a_finite_term_and_no_gradient(advantage: float) -> None:
    log_ratio = torch.tensor([[-1000.0]])
    found, slope = terms_and_gradient(log_ratio, torch.tensor([[advantage]]), torch.tensor([[True]]), **BOUNDS)
    assert found.item() == pytest.approx(0.0 if advantage > 0 else 0.8)
    assert slope.item() == 0.0


def test_without_a_lower_bound_a_bad_token_is_never_clipped_from_below() -> None:
    found, slope = terms_and_gradient(
        torch.tensor([[-5.0]]), torch.tensor([[-1.0]]), torch.tensor([[True]]), clip_low=1.0, clip_high=0.2
    )
    assert found.item() == slope.item() == pytest.approx(math.exp(-5), rel=1e-6)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"clip_low": -0.1}, r"clip_low = -0\.1 must lie in \[0, 1\]"),
        ({"clip_low": 1.1}, r"clip_low = 1\.1 must lie in \[0, 1\]"),
        ({"clip_low": math.nan}, "clip_low = nan must lie"),
        ({"clip_high": -0.1}, r"clip_high = -0\.1 must not be negative"),
        ({"clip_high": math.nan}, "clip_high = nan must not be negative"),
        ({"clip_dual": 1.0}, r"clip_dual = 1\.0 must be above 1"),
        ({"clip_dual": math.nan}, "clip_dual = nan must be above 1"),
    ],
)
def test_refusal_of_bounds_that_no_ratio_meets(bounds: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clipped_policy_terms(RATIOS.log(), ADVANTAGES, ALL, **{**BOUNDS, **bounds})


def test_refusal_of_shapes_that_differ() -> None:
    short = slice(1, None)
    for arrays in (
        (RATIOS[:, short], ADVANTAGES, ALL),
        (RATIOS, ADVANTAGES[:, short], ALL),
        (RATIOS, ADVANTAGES, ALL[0]),
    ):
        with pytest.raises(ValueError, match="must have one shape"):
            clipped_policy_terms(*arrays, **BOUNDS)
