"""Test learning rates at points whose value is known without a calculator, and against transformers' schedules."""

import pytest
import torch
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from coati_rl.config.cli import parse
from consumer.optim.learning_rate import LearningRate, constant, cosine, learning_rate, linear

PEAK = 2e-5


@pytest.mark.parametrize(
    ("progress", "rate"),
    [(0.0, 1.0), (1 / 3, 0.1 + 0.9 * 0.75), (0.5, 0.55), (2 / 3, 0.1 + 0.9 * 0.25), (1.0, 0.1), (1.5, 0.1)],
)
def test_it_falls_along_half_a_cosine_to_a_tenth(progress: float, rate: float) -> None:
    assert LearningRate(peak=1e-6).at(progress, step=3) == pytest.approx(rate * 1e-6, rel=1e-12)


def test_the_schedules_end_at_the_fraction_asked_for() -> None:
    assert LearningRate(peak=2.0, min_ratio=0.0).at(1.0, step=9) == pytest.approx(0.0, abs=1e-15)
    assert LearningRate(peak=2.0, min_ratio=1.0).at(0.7, step=9) == pytest.approx(2.0)
    falling = LearningRate(peak=2.0, schedule=linear, min_ratio=0.5)
    assert [falling.at(progress, step=9) for progress in (0.0, 0.5, 1.0)] == [2.0, 1.5, 1.0]
    assert LearningRate(peak=2.0, schedule=constant).at(1.0, step=9) == 2.0


THEIRS = {
    "cosine": lambda optimizer, *sizes: get_cosine_with_min_lr_schedule_with_warmup(optimizer, *sizes, min_lr_rate=0.2),
    "linear": get_linear_schedule_with_warmup,
    "constant": lambda optimizer, warmup, steps: get_constant_schedule_with_warmup(optimizer, warmup),
}


@pytest.mark.parametrize("warmup", ["", "--warmup-ratio 0.3", "--warmup-steps 3"])
@pytest.mark.parametrize(
    "flags",
    ["--lr-schedule cosine --min-lr-ratio 0.2", "--lr-schedule linear --min-lr-ratio 0", "--lr-schedule constant"],
)
def test_rates_are_those_of_transformers_where_all_steps_are_alike(flags: str, warmup: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = THEIRS[flags.split()[1]](optimizer, 3 if warmup else 0, 10)
    ours = learning_rate(parse(f"-lr {PEAK} {flags} {warmup}".split())[0].optimizer)
    for step in range(10):
        assert ours.at(step / 10, step=step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-20), step
        optimizer.step()
        theirs.step()


def test_warm_up_in_steps_lasts_that_long_where_prompts_are_left_out() -> None:
    """Steps 0 to 3 take 1/8 of the run each, those after them 1/16; the schedule begins at step 2 and ends at 0."""
    rate = LearningRate(peak=1.0, schedule=linear, min_ratio=0.0, warmup_steps=2)
    assert [rate.at(step / 8, step=step) for step in range(4)] == [0.0, 0.5, 1.0, pytest.approx(5 / 6)]
    assert rate.at(9 / 16, step=5) == pytest.approx((7 / 16) / (1 - 2 / 5 * 9 / 16))
    assert rate.at(1.0, step=12) == 0.0
    assert rate.at(1.0, step=2) == 0.0, "a run of two steps"
    assert rate.at(0.0, step=5) == 1.0, "an endless run"


@pytest.mark.parametrize("progress", [-0.1, float("nan")])
def test_progress_before_the_start_is_refused(progress: float) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        LearningRate(peak=1.0).at(progress, step=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_ratio": 1.1}, r"min_ratio = 1.1 must lie in \[0, 1\]"),
        ({"warmup_ratio": 1.0}, r"warmup_ratio = 1.0 must lie in \[0, 1\)"),
        ({"warmup_ratio": 0.1, "warmup_steps": 2}, "warmup_ratio = 0.1 and warmup_steps = 2: give one"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearningRate(peak=1.0, **settings)


def test_without_flags_it_is_the_cosine_to_a_tenth_without_warm_up() -> None:
    assert learning_rate(parse([])[0].optimizer) == LearningRate(peak=1e-6, schedule=cosine, min_ratio=0.1)
