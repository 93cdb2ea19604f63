"""Test the weights of KL and entropy that follow a run."""

import pytest

from coati_rl.algorithms.coefficients import Coefficients, EntropyControl, KLControl
from coati_rl.config import Config
from consumer.objectives.run_objective import policy_gradient

SUMS = {"num_tokens": 10.0, "kl_sum": 4.0, "entropy_sum": 5.0, "num_trajectories": 100.0}


@pytest.mark.parametrize(
    ("kl", "samples", "expected"),
    [
        (0.11, 1000, 1 + 0.1 * 1000 / 10_000),  # a tenth above the target
        (0.09, 1000, 1 - 0.1 * 1000 / 10_000),
        (5.0, 1000, 1 + 0.2 * 1000 / 10_000),  # bounded
        (0.0, 500, 1 - 0.2 * 500 / 10_000),
        (-3.0, 500, 1 - 0.2 * 500 / 10_000),  # k1 may be negative
        (0.1, 500, 1.0),
        (0.0, 80_000, 1 - 0.2),  # of more samples than the horizon no more than of as many
        (5.0, 80_000, 1 + 0.2),
    ],
)
def test_value_of_the_adaptive_weight_of_kl(kl: float, samples: float, expected: float) -> None:
    own = Coefficients(kl_control=KLControl(target=0.1, horizon=10_000))
    own.end_step(kl=kl, num_samples=samples, entropy=None)
    assert own.kl_scale == pytest.approx(expected)
    own.end_step(kl=None, num_samples=0, entropy=None)  # a step without samples
    assert own.kl_scale == pytest.approx(expected)


def test_the_entropy_bonus_counts_after_a_step_at_or_below_the_target_alone_and_stays_in_its_bounds() -> None:
    own = Coefficients(entropy_coeff=0.01, entropy_control=EntropyControl(target=1.0, delta=0.004, largest=0.02))
    seen = []
    for entropy in (1.5, 1.5, 1.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 2.0):
        own.end_step(kl=None, num_samples=8, entropy=entropy)
        seen.append((round(own.entropy_coeff, 6), round(own.applied_entropy_coeff, 6)))
    coeffs = [0.006, 0.002, 0.0, 0.004, 0.008, 0.012, 0.016, 0.02, 0.02, 0.016]
    assert seen == [(c, 0.0 if i in (0, 1, 2, 9) else c) for i, c in enumerate(coeffs)]


KL_CONTROL = KLControl(target=0.1, horizon=1000)
ENTROPY_CONTROL = EntropyControl(target=1.0, delta=0.004, largest=0.5)


def test_a_saved_state_goes_on_where_it_was() -> None:
    own = Coefficients(kl_scale=1.5, entropy_coeff=0.3, last_entropy=0.7)
    other = Coefficients(kl_control=KL_CONTROL, entropy_control=ENTROPY_CONTROL)
    other.restore(own.state())
    assert other.state() == own.state()
    other.restore({})  # of a checkpoint of a run without them
    assert other.state() == own.state()


def test_a_weight_that_is_not_adapted_is_as_the_run_sets_it_whatever_the_checkpoint_s_run_did() -> None:
    adapted = Coefficients(kl_scale=6.2, entropy_coeff=0.3, last_entropy=0.7).state()
    fixed = Coefficients(entropy_coeff=0.02)
    fixed.restore(adapted)
    assert fixed.state() == Coefficients(entropy_coeff=0.02).state()
    begun = Coefficients(entropy_coeff=0.02, entropy_control=ENTROPY_CONTROL)
    begun.restore(Coefficients(entropy_coeff=0.0).state())
    assert begun.state() == Coefficients(entropy_coeff=0.02).state(), "the first run had a fixed weight"


@pytest.mark.parametrize(("flags", "in_loss"), [({"algo": "GRPO"}, True), ({"algo": "REINFORCE_PP"}, False)])
def test_the_next_step_has_the_new_weight_where_kl_acts(flags: dict[str, str], in_loss: bool) -> None:
    objective = policy_gradient(Config(**flags, kl_controller="adaptive", kl_target=0.1, kl_horizon=1000))
    objective.end_step(SUMS)  # KL 0.4: bounded
    scale = 1 + 0.2 * 100 / 1000
    loss = objective.losses["policy"]
    assert loss.kl_coeff == pytest.approx(0.01 * scale if in_loss else 0.0)
    assert objective.coefficients.kl_scale == pytest.approx(scale)
    assert objective.state() == {"kl_scale": pytest.approx(scale), "entropy_coeff": 0.0, "last_entropy": None}


def test_a_critics_rewards_have_the_new_weight() -> None:
    objective = policy_gradient(Config(algo="PPO", kl_controller="adaptive", kl_target=0.1, kl_horizon=1000))
    objective.end_step(SUMS)
    assert objective.first_kl_coeff * objective.coefficients.kl_scale == pytest.approx(0.01 * 1.02)


def test_the_entropy_bonus_begins_when_entropy_falls() -> None:
    config = Config(kl_coeff=0, entropy_target=0.6, entropy_coeff=0.01, entropy_coeff_delta=0.002)
    objective = policy_gradient(config)
    assert objective.losses["policy"].entropy_coeff == 0
    objective.end_step(SUMS)  # 0.5 nats
    assert objective.losses["policy"].entropy_coeff == pytest.approx(0.012)
