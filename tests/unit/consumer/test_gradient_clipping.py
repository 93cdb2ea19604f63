"""Scaling, clipping and refusal on two tensors whose gradient is (3, 4), of norm 5."""

import math

import pytest
import torch
from torch import Tensor

from coati_rl.errors import EngineError
from consumer.optim.gradient_clipping import scale_and_clip, sum_of_squares


def make_gradients(*values: float) -> list[Tensor]:
    return [torch.tensor([value]) for value in values]


def clipped(gradients: list[Tensor], *, loss_scale: float, max_norm: float = 1.0) -> tuple[list[float], float]:
    norm = scale_and_clip(gradients, sum_of_squares(gradients), loss_scale=loss_scale, max_norm=max_norm)
    return [gradient.item() for gradient in gradients], norm


def test_squares_are_added_up_over_tensors_of_any_shape() -> None:
    assert sum_of_squares([torch.tensor([[1.0, 2.0], [0.0, -2.0]]), torch.tensor(4.0)]) == 1 + 4 + 4 + 16
    assert sum_of_squares([]) == 0.0


def test_many_small_tensors_beside_a_large_one_are_not_lost() -> None:
    # float32 has no odd numbers above 2**24.
    assert sum_of_squares([torch.tensor([4096.0]), *make_gradients(*[1.0] * 101)]) == 2**24 + 101


def test_a_large_tensor_has_the_norm_that_its_parts_have() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(2**23)
    exact = gradient.double().square().sum().item()
    assert sum_of_squares([gradient]) == pytest.approx(exact, rel=1e-6)
    assert sum_of_squares(list(gradient.view(2, -1))) == pytest.approx(exact, rel=1e-6)
    assert abs(gradient.norm().item() ** 2 / exact - 1) > 1e-5, "else torch alone would do"


def test_a_gradient_below_the_bound_is_only_scaled() -> None:
    values, norm = clipped(make_gradients(3.0, 4.0), loss_scale=0.1)
    assert values == pytest.approx([0.3, 0.4])
    assert norm == pytest.approx(0.5)


def test_scaling_comes_before_clipping_and_the_norm_is_that_between() -> None:
    values, norm = clipped(make_gradients(3.0, 4.0), loss_scale=2.0)
    assert values == pytest.approx([0.6, 0.8], rel=1e-6)
    assert norm == pytest.approx(10.0)


def test_a_gradient_of_zero_stays_zero() -> None:
    assert clipped(make_gradients(0.0, 0.0), loss_scale=1.0) == ([0.0, 0.0], 0.0)


def test_the_norm_may_be_of_more_than_this_process_holds() -> None:
    gradients = make_gradients(3.0, 4.0)
    assert scale_and_clip(gradients, 2500.0, loss_scale=1.0, max_norm=1.0) == 50.0
    assert [gradient.item() for gradient in gradients] == pytest.approx([3 / 50, 4 / 50], rel=1e-6)


def test_a_rank_that_holds_nothing_learns_the_norm_too() -> None:
    assert scale_and_clip([], 25.0, loss_scale=0.5, max_norm=1.0) == 2.5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_refused_before_anything_is_touched(value: float) -> None:
    gradients = make_gradients(3.0, value)
    with pytest.raises(EngineError, match=f"the gradient norm is {value}: .* no step was taken"):
        clipped(gradients, loss_scale=0.5)
    assert gradients[0].item() == 3.0
