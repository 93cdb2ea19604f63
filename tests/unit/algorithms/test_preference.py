"""Test losses of preference pairs: by hand, against the papers, mask, splits, extremes and refusals."""

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from coati_rl.algorithms.preference import (
    dpo_terms,
    ipo_terms,
    odds_ratio_terms,
    robust_dpo_terms,
    simpo_terms,
)
from coati_rl.algorithms.sequences import unit_sums
from consumer.objectives.preference import Preference
from tests.unit.algorithms import preference_oracle as oracle
from tests.unit.algorithms.units import evaluate, micro_batches_of, random_completions, samples_of

LN3 = math.log(3)
SEEDS = pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
CASES: dict[str, tuple[Preference, Callable[..., oracle.Pair]]] = {
    "dpo": (Preference(beta=0.3), functools.partial(oracle.dpo, beta=0.3)),
    "cdpo": (Preference(beta=0.7, label_smoothing=0.2), functools.partial(oracle.dpo, beta=0.7, wrong=0.2)),
    "robust": (
        Preference(loss="robust", beta=0.7, label_smoothing=0.2),
        functools.partial(oracle.robust, beta=0.7, wrong=0.2),
    ),
    "ipo": (Preference(loss="ipo", beta=0.4), functools.partial(oracle.ipo, beta=0.4)),
    "simpo": (
        Preference(loss="simpo", beta=2.0, simpo_gamma=0.8),
        functools.partial(oracle.simpo, beta=2.0, gamma=0.8),
    ),
    "simpo, smoothed": (
        Preference(loss="simpo", beta=2.0, simpo_gamma=0.8, label_smoothing=0.1),
        functools.partial(oracle.simpo, beta=2.0, gamma=0.8, wrong=0.1),
    ),
    "orpo": (Preference(loss="orpo", orpo_lambda=0.5), functools.partial(oracle.orpo, weight=0.5)),
    "rpo": (Preference(beta=0.3, nll_coeff=0.6), functools.partial(oracle.with_nll, oracle.dpo, 0.6, beta=0.3)),
}
EVERY = pytest.mark.parametrize("name", CASES)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_value_by_hand() -> None:
    # h = ln 3 at beta 1: sigmoid(h) = 3/4, sigmoid(-h) = 1/4
    args = tensor(LN3), tensor(0.0)
    assert dpo_terms(*args, beta=1.0).item() == pytest.approx(math.log(4 / 3))
    smoothed = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert dpo_terms(*args, beta=1.0, label_smoothing=0.25).item() == pytest.approx(smoothed)
    unbiased = (0.75 * math.log(4 / 3) - 0.25 * math.log(4)) / 0.5
    assert robust_dpo_terms(*args, beta=1.0, label_smoothing=0.25).item() == pytest.approx(unbiased)
    assert ipo_terms(tensor(3.0), tensor(1.0), beta=0.5).item() == 1.0  # (2 - 1)^2
    # 2 * (ln 3 - 0) - ln 3 = ln 3
    assert simpo_terms(*args, beta=2.0, gamma=LN3).item() == pytest.approx(math.log(4 / 3))
    # odds(3/4) = 3, odds(1/2) = 1: sigmoid(ln 3) = 3/4
    assert odds_ratio_terms(tensor(math.log(0.75)), tensor(math.log(0.5))).item() == pytest.approx(math.log(4 / 3))


def test_the_gradient_of_dpo_pushes_both_completions_apart_by_beta_times_the_share_of_the_wrong_order() -> None:
    chosen, rejected = tensor(LN3).requires_grad_(), tensor(0.0).requires_grad_()
    dpo_terms(chosen, rejected, beta=2.0).backward()
    assert chosen.grad.item() == pytest.approx(-2.0 / 10)  # sigmoid(-2 ln 3) = 1/10
    assert rejected.grad.item() == pytest.approx(2.0 / 10)


@EVERY
@SEEDS
def test_value_and_gradient_are_the_papers(name: str, seed: int) -> None:
    loss, of_pair = CASES[name]
    completions = random_completions(seed)
    value, gradients, _ = evaluate(loss, micro_batches_of(samples_of(completions)))
    expected = [of_pair(*completions[i : i + 2]) for i in range(0, len(completions), 2)]
    assert value == pytest.approx(sum(each[0] for each in expected), rel=1e-6)
    derivatives = [derivative for each in expected for derivative in each[1:]]
    for found, right in zip(gradients, derivatives, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-12)


@EVERY
def test_the_split_into_rows_micro_batches_and_ranks_changes_nothing(name: str) -> None:
    loss, samples = CASES[name][0], samples_of(random_completions(0))
    value, gradients, sums = evaluate(loss, micro_batches_of(samples))
    for limits in (
        {"max_samples": 2},
        {"max_samples": 4, "one_sample_per_row": True},
        {"max_samples": 4, "num_ranks": 2},
        {"max_samples": 2, "num_ranks": 3, "one_sample_per_row": True},
        {"max_tokens": 20},
    ):
        found = evaluate(loss, micro_batches_of(samples, **limits))
        assert found[0] == pytest.approx(value, rel=1e-12)
        assert found[2] == pytest.approx(sums, rel=1e-12)
        for one, other in zip(found[1], gradients, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


@EVERY
@pytest.mark.parametrize("logprob", [-1e4, 0.0])
def test_extreme_probabilities_have_a_finite_loss_and_gradient(name: str, logprob: float) -> None:
    for places in ((0,), (1,), (0, 1)):
        completions = random_completions(0, lengths=((3, 2),))
        for place in places:
            length = len(completions[place].policy)
            completions[place] = oracle.Completion(np.full(length, logprob), completions[place].reference)
        value, gradients, _ = evaluate(CASES[name][0], micro_batches_of(samples_of(completions)))
        assert math.isfinite(value)
        assert all(np.isfinite(gradient).all() for gradient in gradients)


@EVERY
def test_a_rank_without_samples_adds_nothing(name: str) -> None:
    loss, samples = CASES[name][0], samples_of(random_completions(0))[:2]
    one = evaluate(loss, micro_batches_of(samples))
    arrays = {"loss_mask": torch.zeros(1, 1, dtype=torch.bool), "sample_index": torch.full((1, 1), -1)}
    leaf = torch.zeros(1, 1, requires_grad=True)
    value, sums = loss(leaf, leaf, {**arrays, "ref_logprobs": torch.zeros(1, 1)})
    assert value.item() == 0.0 == torch.autograd.grad(value, leaf)[0].item()
    assert sums.keys() == one[2].keys()
    assert not any(total.item() for total in sums.values())


def test_sums_of_units_are_of_samples_in_order_whatever_row_they_are_in() -> None:
    sample_index = torch.tensor([[5, 5, 0, -1], [4, 1, 1, 1]])
    values = torch.tensor([[1.0, 2.0, 4.0, math.nan], [8.0, 16.0, 32.0, math.inf]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, False]])
    (found,) = unit_sums(mask, sample_index, values)
    assert found.tolist() == [[4.0, 48.0], [8.0, 3.0]]
    assert found.dtype == torch.float64
    with pytest.raises(ValueError, match=r"must have one shape, not \[\(2, 4\), \(2, 4\), \(2, 3\)\]"):
        unit_sums(mask, sample_index, values[:, :3])


def test_a_completion_without_loss_tokens_has_the_log_probability_0() -> None:
    (found,) = unit_sums(torch.tensor([[True]]), torch.tensor([[3]]), torch.tensor([[-2.0]]))
    assert found.tolist() == [[0.0, -2.0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta = 0.0 must be positive"),
        ({"beta": math.inf}, "beta = inf must be positive"),
        ({"label_smoothing": 0.5}, "label_smoothing = 0.5 must be at least 0 and below 0.5"),
        ({"label_smoothing": -0.1}, "label_smoothing = -0.1 must be at least 0 and below 0.5"),
        ({"simpo_gamma": -1.0}, "simpo_gamma = -1.0 must not be negative"),
        ({"orpo_lambda": math.nan}, "orpo_lambda = nan must not be negative"),
        ({"nll_coeff": -1.0}, "nll_coeff = -1.0 must not be negative"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing = 0.1: ipo has none"),
        ({"loss": "orpo", "nll_coeff": 0.1}, "nll_coeff = 0.1: orpo has this term with the weight 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preference(**settings)


def test_a_loss_with_a_reference_refuses_a_batch_that_was_not_scored() -> None:
    arrays = {"loss_mask": torch.ones(1, 1, dtype=torch.bool), "sample_index": torch.zeros(1, 1)}
    with pytest.raises(ValueError, match="ipo needs ref_logprobs: score the batch with a reference"):
        Preference(loss="ipo")(torch.zeros(1, 1), torch.zeros(1, 1), arrays)
