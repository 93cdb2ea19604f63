"""Test what bfloat16's rounding explains of a mismatch, on numbers that a reader can redo."""

import numpy as np
import pytest

from coati_rl.algorithms.rounding import RoundingSums


def sums(engine, trainer, *, repeats=16):
    """Of tokens whose log-probability is -1 in float32, and off by these in the engine and the trainer."""
    of_engine, of_trainer = (np.tile(np.array(each, dtype=np.float32) - 1, repeats) for each in (engine, trainer))
    return RoundingSums.of(of_engine, of_trainer, np.full_like(of_engine, -1))


def test_rounding_is_the_trainers_distance_from_float32_and_the_shift_is_the_engines_from_the_trainer():
    measured = sums([0.0, 0.06], [0.01, -0.03])
    assert measured.tokens == 32
    assert measured.mean == pytest.approx(0.02, rel=1e-5)
    assert measured.squares / 32 == pytest.approx(0.0005, rel=1e-5)
    assert measured.shift_mean == pytest.approx(0.04, rel=1e-5)  # -0.01 and 0.09


def test_a_gap_may_be_twice_the_rounding_and_four_standard_errors():
    measured = sums([0, 0], [0.01, -0.03])  # mean 0.02, standard deviation 0.01
    assert measured.gap_limit(32) == pytest.approx(2 * (0.02 + 4 * 0.01 * 0.25), rel=1e-4)  # sqrt(1/32 + 1/32)
    assert measured.gap_limit(1e9) == pytest.approx(2 * (0.02 + 4 * 0.01 * 0.176777), rel=1e-4)
    many = RoundingSums.total([measured] * 100)
    assert many.gap_limit(3200) == pytest.approx(2 * (0.02 + 4 * 0.01 * 0.025), rel=1e-4)
    assert measured.explained == pytest.approx(0.04, rel=1e-4)


def test_a_shift_may_be_a_quarter_of_the_rounding_and_four_standard_errors_of_twice_the_deviation():
    measured = RoundingSums.total([sums([0, 0], [0.01, -0.03])] * 100)
    assert measured.shift_limit() == pytest.approx(0.25 * 0.02 + 4 * 2 * 0.01 / 3200**0.5, rel=1e-4)


def test_no_limit_is_below_a_thousandth_nor_above_three_tenths():
    assert sums([0, 0], [1e-6, -1e-6]).gap_limit(32) == sums([0, 0], [1e-6, -1e-6]).shift_limit() == 1e-3
    assert sums([0, 0], [1.0, -3.0]).gap_limit(32) == sums([0, 0], [1.0, -3.0]).shift_limit() == 0.3


def test_fewer_than_thirty_two_tokens_explain_nothing_and_forbid_nothing_up_to_three_tenths():
    few = sums([0], [0.01], repeats=31)
    assert (few.gap_limit(31), few.shift_limit(), few.explained) == (0.3, 0.3, 0.0)
    assert (RoundingSums().gap_limit(1), RoundingSums().shift_mean) == (0.3, 0.0)


def test_a_steps_metrics_hold_what_its_sums_held():
    measured = sums([0.0, 0.06], [0.01, -0.03])
    metrics = {
        "logprob_rounding_mean": measured.mean,
        "logprob_rounding_rms": (measured.squares / 32) ** 0.5,
        "logprob_rounding_tokens": 32,
        "logprob_shift_mean": measured.shift_mean,
    }
    restored = RoundingSums.from_metrics(metrics)
    assert (restored.mean, restored.shift_mean) == pytest.approx((measured.mean, measured.shift_mean))
    assert restored.gap_limit(32) == pytest.approx(measured.gap_limit(32))
    nothing = dict.fromkeys(metrics) | {"logprob_rounding_tokens": 0}
    assert RoundingSums.from_metrics(nothing) == RoundingSums.from_metrics({}) == RoundingSums()


@pytest.mark.parametrize("size", [0.002, 0.01, 0.04])
def test_engines_that_round_as_much_as_the_trainer_pass_and_those_that_are_off_by_more_do_not(size):
    """Errors of heavy tails, 256 tokens a step; the engine's own are independent of the trainer's."""
    random = np.random.default_rng(0)
    for _ in range(200):
        reference = random.normal(-1, 1, 256)
        trainer, engine = reference + random.laplace(0, size, (2, 256))
        measured = RoundingSums.of(engine, trainer, reference)
        gap = np.abs(engine - trainer).mean()
        assert gap <= measured.gap_limit(256)
        assert abs(measured.shift_mean) <= measured.shift_limit()
        wrong = engine + np.where(random.random(256) < 0.5, 1, -1) * max(0.02, 4 * size)
        assert np.abs(wrong - trainer).mean() > measured.gap_limit(256)


def test_a_shift_that_hides_in_the_rounding_of_a_step_shows_in_sixteen():
    random = np.random.default_rng(0)
    steps = []
    for _ in range(16):
        reference = random.normal(-1, 1, 256)
        trainer, engine = reference + random.laplace(0, 0.03, (2, 256))
        steps.append(RoundingSums.of(engine + 0.02, trainer, reference))
    assert abs(steps[0].shift_mean) <= steps[0].shift_limit()
    together = RoundingSums.total(steps)
    assert together.shift_mean > together.shift_limit()
