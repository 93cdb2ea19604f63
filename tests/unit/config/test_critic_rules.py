"""Test the settings of a critic: refusals with their remedies, the preset, and what the plan says."""

import pytest

from coati_rl.config.cli import build_config, parse
from coati_rl.config.critic_rules import critic_problems
from coati_rl.config.plan import make_plan
from coati_rl.config.rules import check


def problems(text: str) -> list[str]:
    return [*critic_problems(parse(text.split())[0])]


@pytest.mark.parametrize(
    ("flags", "refused", "accepted"),
    [
        ("-a PPO --turn-advantages 0.9", "--turn-advantages 0.9 with --advantage-estimator gae", ["-a PPO"]),
        ("-a PPO --distill-only --teacher big", "--distill-only with", ["-a PPO --teacher big"]),
        (
            "-a PPO --length-lambda 0.05 --gae-lambda 0.9",
            "--length-lambda with --gae-lambda",
            ["-a PPO --length-lambda 0.05", "-a PPO --gae-lambda 0.9"],
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_and_its_remedies_are_accepted(flags, refused, accepted) -> None:
    (problem,) = problems(flags)
    assert problem.startswith(refused)
    for remedy in accepted:
        assert problems(remedy) == []


def test_the_preset_is_ppo_with_a_critic_and_its_parts_can_be_given_to_others() -> None:
    config = build_config({"model": "m", "dataset": "d", "algo": "ppo"})
    assert config.algorithm.has_critic and config.algorithm.kl_place == "reward" and config.algorithm.whiten_advantages
    assert build_config({"model": "m", "dataset": "d", "advantage_estimator": "gae"}).algorithm.has_critic
    assert not build_config({"model": "m", "dataset": "d"}).algorithm.has_critic


def test_the_plan_names_the_critic() -> None:
    config = parse(["-a", "PPO", "--length-lambda", "0.05"])[0]
    check(config)
    lines = str(make_plan(config, num_prompts=64, device="cpu").lines())
    assert "critic from --model, gamma 1, lambda by length, 0.05" in lines
