"""The clipped surrogate against eq. 7 of the PPO paper, written out in plain Python."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from coati_rl.algorithms.policy_loss import MAX_LOG_RATIO, clipped_policy_terms

LOW, HIGH = 0.2, 0.28
LOGPROBS = [[-1.0, -0.5, -2.0, -0.1], [-3.0, -0.7, -1.2, -4.0]]
OLD_LOGPROBS = [[-1.0, -1.0, -1.5, -0.4], [-2.9, -1.7, -0.2, -4.1]]
ADVANTAGES = [[1.0, 1.0, -1.0, -0.5], [0.0, -2.0, 2.0, 1.5]]


def terms_of(logprobs: Tensor, mask: list[list[bool]] | None = None, rows: slice = slice(None)) -> Tensor:
    loss_mask = torch.ones(2, 4, dtype=torch.bool) if mask is None else torch.tensor(mask)
    terms, _ = clipped_policy_terms(
        logprobs[rows],
        torch.tensor(OLD_LOGPROBS)[rows],
        torch.tensor(ADVANTAGES)[rows],
        loss_mask[rows],
        clip_low=LOW,
        clip_high=HIGH,
    )
    return terms


def oracle(logprob: float, old_logprob: float, advantage: float) -> float:
    ratio = math.exp(logprob - old_logprob)
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    return -min(ratio * advantage, clipped * advantage)


def test_value_each_term_is_minus_the_smaller_of_two_products() -> None:
    expected = np.vectorize(oracle)(LOGPROBS, OLD_LOGPROBS, ADVANTAGES)
    np.testing.assert_allclose(terms_of(torch.tensor(LOGPROBS)).numpy(), expected, rtol=1e-6)


def test_value_three_terms_by_hand() -> None:
    # ratio 1; ratio 2 cut to 1.28 as it may not win more; ratio 1/2 cut to 0.8 as it may not lose less
    terms, ratio = clipped_policy_terms(
        torch.tensor([[0.0, math.log(2), -math.log(2)]]),
        torch.zeros(1, 3),
        torch.tensor([[3.0, 1.0, -1.0]]),
        torch.ones(1, 3, dtype=torch.bool),
        clip_low=LOW,
        clip_high=HIGH,
    )
    np.testing.assert_allclose(terms.numpy(), [[-3.0, -1.28, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(ratio.numpy(), [[1.0, 2.0, 0.5]], rtol=1e-6)


def test_gradient_is_minus_ratio_times_advantage_inside_the_bounds_and_zero_beyond() -> None:
    logprobs = torch.tensor([[0.1, math.log(2), -math.log(2), math.log(2)]], requires_grad=True)
    advantages = torch.tensor([[3.0, 1.0, -1.0, -1.0]])
    terms, ratio = clipped_policy_terms(
        logprobs, torch.zeros(1, 4), advantages, torch.ones(1, 4, dtype=torch.bool), clip_low=LOW, clip_high=HIGH
    )
    terms.sum().backward()
    # The last one got likelier although it was bad: that is never forgiven, so its gradient stays.
    np.testing.assert_allclose(logprobs.grad.numpy(), [[-3 * math.exp(0.1), 0, 0, 2]], rtol=1e-6)
    assert not ratio.requires_grad


def test_mask_padding_of_any_content_changes_neither_terms_nor_gradient() -> None:
    mask = [[True, True, False, False], [False, True, True, False]]
    clean = torch.tensor(LOGPROBS, requires_grad=True)
    terms_of(clean, mask).sum().backward()
    hidden = ~torch.tensor(mask)
    for poison in (math.inf, -math.inf, math.nan):
        logprobs = torch.tensor(LOGPROBS).masked_fill(hidden, poison).requires_grad_()
        terms, ratio = clipped_policy_terms(
            logprobs,
            torch.tensor(OLD_LOGPROBS).masked_fill(hidden, poison),
            torch.tensor(ADVANTAGES).masked_fill(hidden, poison),
            torch.tensor(mask),
            clip_low=LOW,
            clip_high=HIGH,
        )
        terms.sum().backward()
        assert terms[hidden].tolist() == [0.0] * 4
        assert ratio[hidden].tolist() == [1.0] * 4
        assert torch.equal(logprobs.grad, clean.grad)


def test_split_rows_one_by_one_add_up_to_all_rows_at_once() -> None:
    whole, parts = (torch.tensor(LOGPROBS, requires_grad=True) for _ in range(2))
    terms_of(whole).sum().backward()
    for row in range(2):
        terms_of(parts, rows=slice(row, row + 1)).sum().backward()
    assert torch.equal(whole.grad, parts.grad)


def test_a_token_that_became_unboundedly_likely_gives_a_finite_term() -> None:
    logprobs = torch.tensor([[0.0]], requires_grad=True)
    terms, _ = clipped_policy_terms(
        logprobs,
        torch.tensor([[-200.0]]),
        torch.tensor([[-1.0]]),
        torch.tensor([[True]]),
        clip_low=LOW,
        clip_high=HIGH,
    )
    terms.sum().backward()
    assert terms.item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-6)
    assert logprobs.grad.item() == 0.0


def test_refusal_of_shapes_that_differ_and_bounds_that_no_ratio_meets() -> None:
    two, three = torch.zeros(1, 2), torch.zeros(1, 3)
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="must have one shape"):
        clipped_policy_terms(two, three, two, mask, clip_low=LOW, clip_high=HIGH)
    with pytest.raises(ValueError, match="advantages have shape"):
        clipped_policy_terms(two, two, three, mask, clip_low=LOW, clip_high=HIGH)
    with pytest.raises(ValueError, match=r"clip_low = 1\.0"):
        clipped_policy_terms(two, two, two, mask, clip_low=1.0, clip_high=HIGH)
    with pytest.raises(ValueError, match=r"clip_high = -0\.1"):
        clipped_policy_terms(two, two, two, mask, clip_low=LOW, clip_high=-0.1)
