"""Test what is refused of weights and a reference that follow the policy, and of losses and selections of tokens."""

import pytest

from coati_rl.config.algorithm_rules import algorithm_problems
from coati_rl.config.cli import parse
from coati_rl.config.control_rules import check_reference, control_problems
from coati_rl.errors import ConfigError

# What is given; how the one problem begins; what repairs it when it is added.
REFUSALS = [
    (
        "--entropy-target 0.5 --entropy-coeff 2",
        "--entropy-coeff 2 exceeds --entropy-coeff-max 1: begin with less",
        "--entropy-coeff-max 3",
    ),
    (
        "--token-selection clip_cov --token-covariance 5,1",
        "--token-covariance 5,1: give two numbers in order",
        "--token-covariance 1,5",
    ),
    (
        "--policy-loss vespo --vespo-negative 0,2",
        "--vespo-negative 0.0,2.0: K and LAMBDA must be above 0",
        "--vespo-negative 3,2",
    ),
]


def problems(text: str) -> list[str]:
    config = parse(text.split())[0]
    return [*algorithm_problems(config), *control_problems(config)]


@pytest.mark.parametrize(("text", "begin", "remedy"), REFUSALS, ids=[text for text, _, _ in REFUSALS])
def test_what_contradicts_itself_is_refused_once_with_a_remedy(text: str, begin: str, remedy: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith(begin)
    assert problems(f"{text} {remedy}") == []


@pytest.mark.parametrize(("update", "is_refused"), [("ema=0.99", True), ("every=5,mix=0.05", True), ("every=5", False)])
def test_a_share_that_bfloat16_rounds_away_is_refused_there(update: str, is_refused: bool) -> None:
    config = parse(["--reference-update", update])[0]
    check_reference(config, "fp32")
    if is_refused:
        with pytest.raises(ConfigError, match=f"--reference-update {update} with --precision bf16"):
            check_reference(config, "bf16")
    else:
        check_reference(config, "bf16")
