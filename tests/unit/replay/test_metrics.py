"""Metrics of a step are compared within what rounding explains: a mean's, or one token's."""

import pytest
import torch

from coati_rl.replay.gradient_stage import check_metrics, tolerance_of
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
