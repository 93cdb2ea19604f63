"""Test the optimizer's flags: values, and contradictions, which are refused with a remedy."""

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError


def optimizer(text):
    return parse(text.split())[0].optimizer


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        check(parse(text.split())[0])
    return str(caught.value)


def test_betas_are_two_numbers():
    assert optimizer("").adam_betas == (0.9, 0.999)
    assert optimizer("--adam-betas 0.9,0.95").adam_betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--adam-betas 0.9", "--adam-betas '0.9': give two numbers, BETA1,BETA2, like 0.9,0.95"),
        ("--adam-betas 0.9,1", "--adam-betas '0.9,1': each must be at least 0 and below 1"),
        ("--adam-betas nan,0.9", "--adam-betas 'nan,0.9': each must be at least 0 and below 1"),
        ("--adam-eps 0", "--adam-eps '0': Input should be greater than 0"),
        ("--warmup-ratio 1", "--warmup-ratio '1': Input should be less than 1"),
        ("--warmup-steps 2.5", "--warmup-steps '2.5': Input should be a valid integer"),
        ("--min-lr-ratio 2", "--min-lr-ratio '2': Input should be less than or equal to 1"),
        (
            "--warmup-ratio 0.1 --warmup-steps 5",
            "--warmup-ratio 0.1 with --warmup-steps 5: both set the length of the warm-up; give one",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(text, message):
    assert message in refusal(text)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("--lr-schedule constant --warmup-steps 5", "constant"),
        ("--lr-schedule linear --min-lr-ratio 0 --warmup-ratio 0.1", "linear"),
    ],
)
def test_warm_up_goes_with_every_schedule(text, schedule):
    config = parse(text.split())[0]
    check(config)
    assert config.optimizer.lr_schedule == schedule
