"""Test the settings of a critic: the preset, and what the plan says."""

from coati_rl.config.cli import build_config, parse
from coati_rl.config.plan import make_plan
from coati_rl.config.rules import check


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
