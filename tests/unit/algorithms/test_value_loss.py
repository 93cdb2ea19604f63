"""Test the critic's loss: against the formulae of PPO's code and of others, and what it reports."""

import math

import numpy as np
import pytest
import torch

from coati_rl.algorithms.value_loss import ValueLoss, value_metrics
from coati_rl.ops.vocab_chunks import slices

N = 12


def arrays(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def numbers() -> torch.Tensor:
        return torch.randn(2, N, generator=generator)

    mask = torch.rand(2, N, generator=generator) > 0.3
    mask[1, N // 2 :] = False
    return {
        "values": numbers(),
        "old_values": numbers(),
        "returns": numbers(),
        "loss_mask": mask,
        "loss_weights": torch.where(mask, torch.rand(2, N, generator=generator), 0.0),
    }


def evaluate(loss: ValueLoss, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict, torch.Tensor]:
    values = batch["values"].clone().requires_grad_()
    summed, sums = loss(values, torch.zeros_like(values), batch)
    (gradient,) = torch.autograd.grad(summed, values)
    return summed.detach(), sums, gradient


def by_definition(values, old, returns, weight, clip):
    """`vpredclipped` of OpenAI's baselines, also verl's compute_value_loss, one token at a time."""
    clipped = min(max(values, old - clip), old + clip) if clip is not None else values
    return weight * 0.5 * max((values - returns) ** 2, (clipped - returns) ** 2)


@pytest.mark.parametrize("clip", [None, 0.2, 0.5])
def test_the_loss_is_the_larger_of_the_plain_and_the_clipped_error(clip) -> None:
    batch = arrays()
    found, _, gradient = evaluate(ValueLoss(clip=clip), batch)
    mask = batch["loss_mask"]
    columns = [batch[name][mask].tolist() for name in ("values", "old_values", "returns", "loss_weights")]
    right = sum(by_definition(*token, clip) for token in zip(*columns, strict=True))
    assert float(found) == pytest.approx(right, rel=1e-6)
    assert (gradient[~mask] == 0).all()
    if clip is None:
        weighted = batch["loss_weights"] * (batch["values"] - batch["returns"])
        assert torch.allclose(gradient, weighted, atol=1e-6)


def test_a_value_that_moved_away_from_its_return_beyond_the_clip_keeps_its_gradient() -> None:
    one = torch.ones(1, 1)
    batch = {"values": 2 * one, "old_values": 0 * one, "loss_mask": one.bool(), "loss_weights": one}
    _, sums, gradient = evaluate(ValueLoss(clip=0.5), batch | {"returns": 0 * one})
    assert (float(gradient), float(sums["value_clip_sum"])) == (2.0, 0.0)
    _, sums, gradient = evaluate(ValueLoss(clip=0.5), batch | {"returns": 3 * one})  # it moved towards it, too far
    assert (float(gradient), float(sums["value_clip_sum"])) == (0.0, 1.0)


def test_huber_is_linear_beyond_its_width() -> None:
    batch = arrays()
    found, _, gradient = evaluate(ValueLoss(huber=0.7), batch)
    terms = torch.nn.functional.huber_loss(batch["values"], batch["returns"], reduction="none", delta=0.7)
    assert float(found) == pytest.approx(float((batch["loss_weights"] * terms).sum()), rel=1e-6)
    assert (gradient.abs() <= 0.7 * batch["loss_weights"] + 1e-6).all()


def test_it_is_a_sum_however_the_tokens_are_divided() -> None:
    batch, loss = arrays(), ValueLoss(clip=0.3)
    whole, sums, gradient = evaluate(loss, batch)
    parts = [evaluate(loss, {k: v[:, part] for k, v in batch.items()}) for part in slices(N, 5)]
    assert float(sum(each[0] for each in parts)) == pytest.approx(float(whole), rel=1e-6)
    assert torch.allclose(torch.cat([each[2] for each in parts], dim=1), gradient)
    for name, value in sums.items():
        assert float(sum(each[1][name] for each in parts)) == pytest.approx(float(value), rel=1e-6)
        assert value.dtype == torch.float64


def test_metrics_are_means_over_tokens_and_the_explained_variance() -> None:
    batch = arrays()
    _, sums, _ = evaluate(ValueLoss(clip=0.2), batch)
    found = value_metrics({name: float(value) for name, value in sums.items()}, loss_scale=0.5)
    mask = batch["loss_mask"]
    old, returns, values = (batch[name][mask].double().numpy() for name in ("old_values", "returns", "values"))
    assert found["explained_variance"] == pytest.approx(1 - np.var(returns - old) / np.var(returns), rel=1e-9)
    assert found["value_mean"] == pytest.approx(values.mean()) and found["return_mean"] == pytest.approx(returns.mean())
    assert found["value_loss"] == pytest.approx(0.5 * float(sums["value_loss_sum"]))
    assert 0 <= found["value_clip_fraction"] <= 1
    constant = {name: float(value) for name, value in sums.items()} | {"return_sum": 0.0, "return_squares": 0.0}
    assert value_metrics(constant, loss_scale=0.5)["explained_variance"] is None
    nothing = value_metrics(dict.fromkeys(sums, 0.0), loss_scale=0.0)
    assert set(nothing) == set(found) and set(nothing.values()) == {None}


def test_a_blank_micro_batch_has_no_loss_and_no_nan() -> None:
    blank = {"loss_mask": torch.zeros(1, 1, dtype=torch.bool), "loss_weights": torch.zeros(1, 1)}
    summed, sums, gradient = evaluate(ValueLoss(clip=0.2), blank | {"values": torch.zeros(1, 1)})
    assert float(summed) == 0 and (gradient == 0).all()
    assert all(math.isfinite(float(value)) for value in sums.values())
