"""Test CISPO's term: a weight without gradient, clipped, times A log pi."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coati_rl.algorithms.policy_loss import cispo_terms
from tests.examples import examples
from tests.unit.algorithms.oracle import cispo_term

BOUNDS = {"clip_low": 0.5, "clip_high": 3.0}
LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5, -0.25]], dtype=torch.float64)
RATIOS = torch.tensor([[1.0, 8.0, 0.25, 8.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[3.0, 2.0, -1.0, -2.0]], dtype=torch.float64)
ALL = torch.ones(1, 4, dtype=torch.bool)


def terms_and_gradient(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, **bounds: float
) -> tuple[Tensor, Tensor]:
    """The log-ratio carries gradient too, as it does in the loss: none of it may come back."""
    leaf = logprobs.clone().requires_grad_()
    terms = cispo_terms(leaf, log_ratio + (leaf - leaf.detach()).nan_to_num(), advantages, mask, **bounds)
    terms.sum().backward()
    return terms.detach(), leaf.grad


def test_value_and_gradient_by_hand() -> None:
    # weights 1, 4 (8 cut), 0.5 (0.25 raised), 4; term -w A log pi, gradient -w A: cut tokens keep theirs
    terms, gradient = terms_and_gradient(LOGPROBS, RATIOS.log(), ADVANTAGES, ALL, **BOUNDS)
    assert terms[0].tolist() == pytest.approx([3, 16, -0.25, -2], rel=1e-14)
    assert gradient[0].tolist() == pytest.approx([-3, -8, 0.5, 8], rel=1e-14)


def test_gradient_by_probability_is_minus_w_a_over_p() -> None:
    probability = torch.tensor([[0.25]], dtype=torch.float64, requires_grad=True)
    terms = cispo_terms(probability.log(), torch.tensor([[math.log(2)]]), torch.tensor([[3.0]]), ALL[:, :1], **BOUNDS)
    terms.sum().backward()
    assert probability.grad.item() == pytest.approx(-2 * 3 / 0.25, rel=1e-6)


TOKEN = st.tuples(
    st.floats(-30, 0), st.floats(-3, 3) | st.sampled_from([0.0, 30.5, -30.5, 1000.0, -1000.0]), st.floats(-3, 3)
)


@examples(150)
@given(
    tokens=st.lists(TOKEN, min_size=1, max_size=6), low=st.sampled_from([0.2, 1.0]), high=st.sampled_from([0.2, 4.0])
)
def test_value_and_gradient_of_any_tokens_are_the_formulas(
    tokens: list[tuple[float, float, float]], low: float, high: float
) -> None:
    arrays = torch.tensor(tokens, dtype=torch.float64).T[:, None]
    mask = torch.ones_like(arrays[0], dtype=torch.bool)
    found = terms_and_gradient(*arrays, mask, clip_low=low, clip_high=high)
    expected = [cispo_term(*token, low, high) for token in tokens]
    for got, wanted in zip(found, zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(got[0].numpy(), wanted, rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_mask_padding_of_any_content_changes_neither_terms_nor_gradient(poison: float) -> None:
    mask = torch.tensor([[True, False, True, False]])
    log_ratio = torch.where(mask, RATIOS.log(), 0.0)  # as masked_log_ratio gives it
    clean = terms_and_gradient(LOGPROBS, log_ratio, ADVANTAGES, mask, **BOUNDS)
    poisoned = (torch.where(mask, values, poison) for values in (LOGPROBS, ADVANTAGES))
    logprobs, advantages = poisoned
    found = terms_and_gradient(logprobs, log_ratio, advantages, mask, **BOUNDS)
    assert all(torch.equal(got, wanted) for got, wanted in zip(found, clean, strict=True))
    assert not found[0][~mask].any()
    assert not found[1][~mask].any()


def test_split_tokens_one_by_one_have_the_terms_and_gradients_of_the_whole() -> None:
    arrays = (LOGPROBS, RATIOS.log(), ADVANTAGES, ALL)
    whole = terms_and_gradient(*arrays, **BOUNDS)
    for t in range(4):
        part = terms_and_gradient(*(array[:, t : t + 1] for array in arrays), **BOUNDS)
        assert all(torch.equal(got, wanted[:, t : t + 1]) for got, wanted in zip(part, whole, strict=True))


def test_without_a_lower_bound_small_ratios_count_as_they_are() -> None:
    _, gradient = terms_and_gradient(LOGPROBS, RATIOS.log(), ADVANTAGES, ALL, clip_low=1.0, clip_high=4.0)
    assert gradient[0].tolist() == pytest.approx([-3, -5 * 2, 0.25, 5 * 2], rel=1e-14)


def test_refusal_of_bounds_that_no_ratio_meets_and_of_shapes_that_differ() -> None:
    arrays = (LOGPROBS, RATIOS.log(), ADVANTAGES, ALL)
    for bounds in ({"clip_low": 1.5}, {"clip_high": -1.0}):
        ((name, value),) = bounds.items()
        with pytest.raises(ValueError, match=f"{name} = {value} must"):
            cispo_terms(*arrays, **{**BOUNDS, **bounds})
    with pytest.raises(ValueError, match="must have one shape"):
        cispo_terms(LOGPROBS, RATIOS.log(), ADVANTAGES[:, 1:], ALL, **BOUNDS)
