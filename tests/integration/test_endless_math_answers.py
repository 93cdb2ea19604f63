"""Test that the time limit ends math answers on which math-verify does not end and which no limit refuses."""

import pytest

from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards import RewardPool

# Each takes math-verify more than 5 s. Others that look as bad are decided in less than one (`x^{x^{x^{x^{x^{x}}}}}`).
ENDLESS = (
    "20!!",
    "1000000!",
    "2^{50!}",
    r"\binom{1000000}{500000}",
    r"\prod_{k=1}^{100000} k^k",
    "(x+1)^{5000}",
    "(a+b+c+d+e)^{60}",
    r"\int_0^{\infty} \frac{\ln(x+3)}{x^5+2} dx",
)
IN_C, IN_PYTHON = "2^{50!}", r"\int_0^{\infty} \frac{\ln(x+3)}{x^5+2} dx"  # where the time limit finds them


@pytest.mark.full
@pytest.mark.parametrize("texts", [(IN_C, IN_PYTHON), pytest.param(ENDLESS, marks=pytest.mark.full)], ids=len)
def test_an_answer_that_never_ends_is_invalid_after_the_time_limit_as_answer_and_as_ground_truth(
    texts: tuple[str, ...],
) -> None:
    spec = RewardSpec(reward_type="boxed", math_answer="any")  # else they are wrong at once: they are no numbers
    with RewardPool(spec, num_workers=2, timeout_s=1) as pool:
        as_answers = [pool.submit([rf"\boxed{{{text}}}", r"\boxed{5}"], Problem(ground_truth="5")) for text in texts]
        as_ground_truth = pool.submit([r"\boxed{5}"], Problem(ground_truth="20!!"))
        for future in as_answers:
            endless, right = future.result(60)
            assert endless.verdict == "invalid"
            assert endless.detail.startswith("timed out after")
            assert right.verdict == "ok"
        assert as_ground_truth.result(60)[0].verdict == "invalid"
