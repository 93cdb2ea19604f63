"""Test what is refused of weights and a reference that follow the policy, and of losses and selections of tokens."""

import pytest

from coati_rl.config.algorithm_rules import algorithm_problems
from coati_rl.config.cli import parse
from coati_rl.config.control_rules import check_reference, control_problems
from coati_rl.errors import ConfigError

# What is given; how the one problem begins; what repairs it when it is added.
REFUSALS = [
    (
        "--kl-target 0.2 --kl-horizon 500",
        "--kl-target 0.2 and --kl-horizon 500.0 without --kl-controller adaptive: has no effect",
        "--kl-controller adaptive",
    ),
    ("--kl-controller adaptive -kl 0", "--kl-controller adaptive without KL: has no weight to adapt", "-kl 0.1"),
    (
        "--entropy-coeff-delta 0.1",
        "--entropy-coeff-delta 0.1 without --entropy-target: has no effect",
        "--entropy-target 0.5",
    ),
    (
        "--entropy-target 0.5 --entropy-coeff 2",
        "--entropy-coeff 2 exceeds --entropy-coeff-max 1: begin with less",
        "--entropy-coeff-max 3",
    ),
    ("--reference-update every=5 -kl 0", "--reference-update every=5 without KL: there is no reference", "-kl 0.1"),
    (
        "--token-fraction 0.1",
        "--token-fraction 0.1 without --token-selection top_entropy or clip_cov or kl_cov: has no effect",
        "--token-selection kl_cov",
    ),
    (
        "--token-selection kl_cov --token-covariance 0,2",
        "--token-covariance 0.0,2.0 without --token-selection clip_cov: has no effect",
        "--token-selection clip_cov",
    ),
    (
        "--token-selection clip_cov --token-covariance 5,1",
        "--token-covariance 5,1: give two numbers in order",
        "--token-covariance 1,5",
    ),
    ("--kl-cov-coeff 2", "--kl-cov-coeff 2.0 without --token-selection kl_cov", "--token-selection kl_cov"),
    ("--vespo-positive 1,2", "--vespo-positive 1.0,2.0 with --policy-loss clip: only vespo", "--policy-loss vespo"),
    (
        "--policy-loss vespo --vespo-negative 0,2",
        "--vespo-negative 0.0,2.0: K and LAMBDA must be above 0",
        "--vespo-negative 3,2",
    ),
    (
        "--policy-loss gmpo --ratio-level sequence",
        "--ratio-level sequence with --policy-loss gmpo: it forms its own ratio",
        "--ratio-level token",
    ),
    (
        "--kl-bias-correction --kl-place reward",
        "--kl-bias-correction with --kl-place reward: weighs KL in the loss",
        "--kl-place loss",
    ),
    (
        "--off-policy-mask-threshold 0.5 --top-p 0.9",
        "--off-policy-mask-threshold 0.5 with --top-p 0.9: compares the trainer's probability",
        "--top-p 1",
    ),
]


def problems(text: str) -> list[str]:
    config = parse(text.split())[0]
    return [*algorithm_problems(config), *control_problems(config)]


@pytest.mark.parametrize(("text", "begin", "remedy"), REFUSALS, ids=[text for text, _, _ in REFUSALS])
def test_what_has_no_effect_or_contradicts_itself_is_refused_once_with_a_remedy(
    text: str, begin: str, remedy: str
) -> None:
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
