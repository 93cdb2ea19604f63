"""Metrics of a step are compared within what rounding explains: a mean's, or one token's; and weights after it."""

import pytest
import torch
from safetensors.torch import save_file

from coati_rl.replay.gradient_stage import check_metrics, check_update, tolerance_of
from coati_rl.replay.training import StepResult


def verdict(precision, name, *, recorded, recomputed):
    result = StepResult(metrics={name: recomputed}, gradients={}, sizes={})
    [loss] = check_metrics(result, {name: recorded}, tolerance_of(precision, is_retrained=False))
    return loss.verdict


@pytest.mark.parametrize(
    ("precision", "name", "recomputed", "expected"),
    [
        (torch.bfloat16, "ratio_max", 1.17, "agrees"),  # one token's, as an honest run had it beside 1.03
        (torch.bfloat16, "ratio_max", 2.7, "differs"),
        (torch.bfloat16, "entropy_mean", 1.17, "differs"),
        (torch.bfloat16, "entropy_mean", 1.06, "agrees"),
        (torch.float32, "ratio_max", 1.0301, "differs"),
        (torch.float32, "entropy_mean", 1.03001, "agrees"),
    ],
)
def test_a_largest_token_may_round_by_more_than_a_mean_in_bfloat16(precision, name, recomputed, expected):
    assert verdict(precision, name, recorded=1.03, recomputed=recomputed) == expected


@pytest.mark.parametrize(("saved", "expected"), [(1.0, "agrees"), (1.5, "differs"), (float("nan"), "differs")])
def test_weights_after_a_step_that_are_no_numbers_differ(tmp_path, saved, expected):
    for role, value in {"policy": saved, "value": 1.01}.items():
        (tmp_path / role).mkdir()
        save_file({"w": torch.tensor([1.0, value])}, tmp_path / role / "model.safetensors")
    before, after = ({role: {"w": torch.full((2,), at)} for role in ("policy", "value")} for at in (0.0, 1.0))
    directories = {role: tmp_path / role for role in after}
    assert check_update(before, after, directories, 0.02).verdict == expected
