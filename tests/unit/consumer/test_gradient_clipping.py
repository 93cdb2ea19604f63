"""Scaling, clipping and refusal on two parameters whose gradient is (3, 4), of norm 5."""

import math

import pytest
import torch

from coati_rl.errors import EngineError
from consumer.gradient_clipping import GradientClipper


def step(clipper: GradientClipper, gradient: tuple[float, float] = (3.0, 4.0)) -> list[float]:
    """Plain gradient descent of rate 1 from (0, 0): where it arrives is minus the gradient that it was given."""
    parameters = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    for parameter, value in zip(parameters, gradient, strict=True):
        parameter.grad = torch.tensor([value])
    optimizer = torch.optim.SGD([*parameters, torch.zeros(1, requires_grad=True)], lr=1.0)  # the third was not used
    optimizer.register_step_pre_hook(clipper)
    try:
        optimizer.step()
    finally:
        arrived = [parameter.item() for parameter in parameters]
    return [-value for value in arrived]


def test_a_gradient_below_the_bound_is_only_scaled() -> None:
    clipper = GradientClipper(max_norm=1.0)
    clipper.loss_scale = 0.1
    assert step(clipper) == pytest.approx([0.3, 0.4])
    assert clipper.norm == pytest.approx(0.5)


def test_scaling_comes_before_clipping_and_the_norm_is_that_between() -> None:
    clipper = GradientClipper(max_norm=1.0)
    clipper.loss_scale = 2.0
    assert step(clipper) == pytest.approx([0.6, 0.8], rel=1e-6)
    assert clipper.norm == pytest.approx(10.0)


def test_a_gradient_of_zero_stays_zero() -> None:
    clipper = GradientClipper(max_norm=1.0)
    assert step(clipper, (0.0, 0.0)) == [0.0, 0.0]
    assert clipper.norm == 0.0


def test_the_norm_may_be_taken_over_more_than_this_process_holds() -> None:
    clipper = GradientClipper(max_norm=1.0, global_norm=lambda gradients: 50.0)
    assert step(clipper) == pytest.approx([3 / 50, 4 / 50], rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_refused_before_anything_moves(value: float) -> None:
    clipper = GradientClipper(max_norm=1.0)
    parameter = torch.ones(1, requires_grad=True)
    parameter.grad = torch.tensor([value])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.register_step_pre_hook(clipper)
    with pytest.raises(EngineError, match=f"the gradient norm is {value}: .* no step was taken"):
        optimizer.step()
    assert parameter.item() == 1.0


def test_a_bound_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_norm = 0\.0 must be positive"):
        GradientClipper(max_norm=0.0)
