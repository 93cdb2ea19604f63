"""KL estimators against their definitions, and against the true KL that they estimate."""

import math

import numpy as np
import pytest
import torch

from coati_rl.algorithms.kl import kl_terms

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
    logprobs = torch.tensor(np.log(policy), dtype=torch.float32)[None]
    ref_logprobs = torch.tensor(np.log(reference), dtype=torch.float32)[None]
    terms = kl_terms(logprobs, ref_logprobs, torch.ones(1, 3, dtype=torch.bool), estimator=estimator)
    assert float((policy * terms.numpy()).sum()) == pytest.approx(divergence, rel=1e-6)


@pytest.mark.parametrize(
    ("estimator", "slope"),
    [("k1", lambda d: 1.0), ("k2", lambda d: d), ("k3", lambda d: 1 - math.exp(-d))],
)
def test_gradient_is_the_definitions_derivative(estimator: str, slope) -> None:
    logprobs = torch.tensor(DIFFERENCE, requires_grad=True)
    kl_terms(logprobs, torch.zeros(1, 4), ALL, estimator=estimator).sum().backward()
    np.testing.assert_allclose(logprobs.grad.numpy(), [[slope(d) for d in DIFFERENCE[0]]], atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_mask_padding_may_hold_infinities(estimator: str) -> None:
    mask = torch.tensor([[True, False, False, True]])
    logprobs = torch.tensor([[-1.0, -math.inf, 0.0, -2.0]], requires_grad=True)
    terms = kl_terms(logprobs, torch.tensor([[-1.5, -1.0, -math.inf, -1.0]]), mask, estimator=estimator)
    terms.sum().backward()
    assert terms[0, 1:3].tolist() == [0.0, 0.0]
    assert logprobs.grad[0, 1:3].tolist() == [0.0, 0.0]
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
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
