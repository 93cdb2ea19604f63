"""Test KL estimators against their definitions, and against the true KL that they estimate."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.algorithms.kl import kl_terms
from tests.examples import examples
from tests.unit.algorithms.oracle import kl_term

ESTIMATORS = ("k1", "k2", "k3")
DIFFERENCE = [[0.0, math.log(2), -math.log(2), 0.3]]
ALL = torch.ones(1, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.0, 0.6931472, -0.6931472, 0.3]),
        ("k2", [0.0, 0.2402265, 0.2402265, 0.045]),
        # exp(-D) + D - 1: 1/2 + 0.6931472 - 1, 2 - 0.6931472 - 1, 0.7408182 + 0.3 - 1
        ("k3", [0.0, 0.1931472, 0.3068528, 0.0408182]),
    ],
)
def test_value_by_hand(estimator: str, expected: list[float]) -> None:
    terms = kl_terms(torch.tensor(DIFFERENCE) - 1.0, torch.full((1, 4), -1.0), ALL, estimator=estimator)
    np.testing.assert_allclose(terms.numpy(), [expected], atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_value_its_mean_over_the_policys_tokens_is_the_kl_divergence(estimator: str) -> None:
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    divergence = float((policy * np.log(policy / reference)).sum())
    logprobs, ref_logprobs = torch.tensor(np.log(policy))[None], torch.tensor(np.log(reference))[None]
    terms = kl_terms(logprobs, ref_logprobs, torch.ones(1, 3, dtype=torch.bool), estimator=estimator)
    assert float((policy * terms.numpy()).sum()) == pytest.approx(divergence, rel=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@examples(120)
@given(
    policy=st.lists(st.floats(-30, 0), min_size=1, max_size=5),
    difference=st.lists(st.floats(-19, 19) | st.sampled_from([0.0, 30.0]), min_size=5, max_size=5),
)
def test_value_and_gradient_of_any_tokens_are_the_formulas(
    estimator: str, policy: list[float], difference: list[float]
) -> None:
    logprobs = torch.tensor([policy], dtype=torch.float64, requires_grad=True)
    reference = [logprob - d for logprob, d in zip(policy, difference, strict=False)]
    mask = torch.ones(1, len(policy), dtype=torch.bool)
    terms = kl_terms(logprobs, torch.tensor([reference], dtype=torch.float64), mask, estimator=estimator)
    terms.sum().backward()
    expected = [kl_term(p, r, estimator) for p, r in zip(policy, reference, strict=True)]
    np.testing.assert_allclose(terms[0].detach().numpy(), [value for value, _ in expected], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(logprobs.grad[0].numpy(), [slope for _, slope in expected], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("difference", [-19.0, -20.5, -30.0, -1000.0])
def test_gradient_of_k3_never_pushes_a_token_further_from_a_reference_that_finds_it_likelier(difference: float) -> None:
    # The derivative is 1 - exp(-D), negative at D < 0. It may be bounded, but not change its sign.
    logprobs = torch.tensor([[difference]], dtype=torch.float64, requires_grad=True)
    terms = kl_terms(logprobs, torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[True]]), estimator="k3")
    terms.sum().backward()
    assert terms.item() >= 0
    assert torch.isfinite(terms).all()
    assert logprobs.grad.item() <= 0


def test_gradient_of_an_estimate_past_the_clamp_is_zero_and_within_it_what_it_was() -> None:
    # k3 at D = -15 is exp(15) - 16 = 3.3e6 with a gradient of 1 - exp(15) = -3.3e6; at D = -2 it is 4.39.
    for clamp, expected in ((None, [1 - math.exp(15), 1 - math.exp(2)]), (10.0, [0.0, 1 - math.exp(2)])):
        logprobs = torch.tensor([[-15.0, -2.0]], dtype=torch.float64, requires_grad=True)
        mask = torch.ones(1, 2, dtype=torch.bool)
        terms = kl_terms(logprobs, torch.zeros_like(logprobs), mask, estimator="k3", clamp=clamp)
        terms.sum().backward()
        assert terms[0, 0].item() == pytest.approx(math.exp(15) - 16 if clamp is None else 10)
        assert terms[0, 1].item() == pytest.approx(math.exp(2) - 3)
        np.testing.assert_allclose(logprobs.grad[0].numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", [-10.0, 10.0]), ("k2", [10.0, 10.0]), ("k3", [10.0, 10.0])])
def test_value_of_a_clamped_estimate_stays_within_both_bounds(estimator: str, expected: list[float]) -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    terms = kl_terms(torch.tensor([[-12.0, 12.0]]), torch.zeros(1, 2), mask, estimator=estimator, clamp=10.0)
    assert terms[0].tolist() == expected


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_mask_padding_may_hold_anything(estimator: str) -> None:
    mask = torch.tensor([[True, False, False, True, False]])
    logprobs = torch.tensor([[-1.0, -math.inf, 0.0, -2.0, math.nan]], requires_grad=True)
    ref_logprobs = torch.tensor([[-1.5, -1.0, -math.inf, -1.0, -math.inf]])
    terms = kl_terms(logprobs, ref_logprobs, mask, estimator=estimator)
    terms.sum().backward()
    assert terms[~mask].tolist() == [0.0] * 3
    assert logprobs.grad[~mask].tolist() == [0.0] * 3
    assert torch.isfinite(terms).all()
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_split_tokens_one_by_one_add_up_to_the_whole(estimator: str) -> None:
    logprobs = torch.tensor(DIFFERENCE)
    whole = kl_terms(logprobs, torch.zeros(1, 4), ALL, estimator=estimator).sum()
    single = torch.ones(1, 1, dtype=torch.bool)
    parts = [kl_terms(logprobs[:, t : t + 1], torch.zeros(1, 1), single, estimator=estimator).sum() for t in range(4)]
    assert whole.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-6)


def test_refusal_of_an_unknown_estimator_and_of_shapes_that_differ() -> None:
    with pytest.raises(ValueError, match="'k4' is unknown; use k1, k2 or k3"):
        kl_terms(torch.zeros(1, 4), torch.zeros(1, 4), ALL, estimator="k4")
    with pytest.raises(ValueError, match="must have one shape"):
        kl_terms(torch.zeros(1, 4), torch.zeros(1, 3), ALL)
