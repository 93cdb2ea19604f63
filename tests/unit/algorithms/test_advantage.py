"""Test group advantages: literal groups checked by hand, any group against the oracle."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coati_rl.algorithms.advantage import ADVANTAGE_ESTIMATORS, group_advantages, needs_baseline
from tests.examples import examples
from tests.unit.algorithms import oracle

ESTIMATORS = tuple(ADVANTAGE_ESTIMATORS)
COMPARISONS = ("group_norm", "group_mean", "leave_one_out", "max_rl", "opo")
BASELINE = 0.75  # reward of the greedy answer, which remax reads
LENGTHS = (3, 1, 7, 2, 5, 4, 9, 8, 6, 11)  # tokens of the samples of a group, which opo reads


def advantages_of(
    rewards: list[float], name: str, valid: list[bool] | None = None, lengths: Sequence[int] = LENGTHS
) -> np.ndarray:
    mask = np.ones(len(rewards), dtype=bool) if valid is None else np.array(valid)
    given = {"lengths": np.array(lengths[: len(rewards)]), "baseline": BASELINE}
    return group_advantages(np.array(rewards), mask, estimator=ADVANTAGE_ESTIMATORS[name], **given)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # mean 2; deviation sqrt((1 + 4 + 9 + 0) / 3) = sqrt(14 / 3), plus 1e-6
        ("group_norm", np.array([-1, -2, 3, 0]) / (math.sqrt(14 / 3) + 1e-6)),
        ("group_mean", [-1, -2, 3, 0]),
        # others' means: 7/3, 8/3, 3/3, 6/3
        ("leave_one_out", [1 - 7 / 3, 0 - 8 / 3, 5 - 1, 2 - 2]),
        ("reward", [1, 0, 5, 2]),
        ("max_rl", np.array([-1, -2, 3, 0]) / (2 + 1e-6)),
        # weighed by 3, 1, 7 and 2 tokens: (3 + 0 + 35 + 4) / 13
        ("opo", np.array([1, 0, 5, 2]) - 42 / 13),
        ("remax", [0.25, -0.75, 4.25, 1.25]),
    ],
)
def test_value_of_the_rewards_1_0_5_2(name: str, expected: list[float]) -> None:
    np.testing.assert_allclose(advantages_of([1, 0, 5, 2], name), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", ESTIMATORS)
@examples(120)
@given(rewards=st.lists(st.floats(-1e3, 1e3) | st.sampled_from([0.0, 0.7, 1.0]), min_size=2, max_size=9))
def test_value_of_any_group_is_the_formulas(name: str, rewards: list[float]) -> None:
    assume(max(rewards) - min(rewards) > 1e-9)  # all but equal: both are rounding errors of the deviation
    assume(name != "max_rl" or abs(np.mean(rewards)) > 1e-3)
    more = {"opo": [LENGTHS[: len(rewards)]], "remax": [BASELINE]}.get(name, [])
    expected = getattr(oracle, name)(rewards, *more)
    np.testing.assert_allclose(advantages_of(rewards, name), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rewards", [[0.1, 0.2, -0.3], [0.7, 0.1, -0.8], [-1.0, -1.0, 0.5], [0.0, 1e-3, -1e-3 + 1e-10]])
def test_max_rl_gives_no_advantage_where_the_mean_is_0_but_for_rounding_or_below_it(rewards: list[float]) -> None:
    assert advantages_of(rewards, "max_rl").tolist() == [0.0, 0.0, 0.0]
    assert advantages_of([1e-9, 0.0, 0.0], "max_rl")[0] > 0, "small rewards are compared, too"


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize(("reward", "size"), [(0.7, 7), (0.0, 4), (1.0, 8), (-0.1, 3), (0.1, 10)])
def test_equal_rewards_have_no_advantage_even_where_their_mean_is_not_exact(
    name: str, reward: float, size: int
) -> None:
    assert advantages_of([reward] * size, name).tolist() == [0.0] * size
    single = np.full(size, reward, dtype=np.float32)  # compared before an estimator is called
    found = group_advantages(single, np.ones(size, dtype=bool), estimator=ADVANTAGE_ESTIMATORS[name])
    assert found.dtype == np.float64
    assert found.tolist() == [0.0] * size


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("valid", [[False, False, False], [True, False, False], [False, False, True]])
def test_fewer_than_two_valid_samples_say_nothing(name: str, valid: list[bool]) -> None:
    assert advantages_of([1.0, 0.0, 5.0], name, valid).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_group_of_one_gives_zero_and_no_nan(name: str) -> None:
    assert advantages_of([1.0], name).tolist() == [0.0]


def test_without_a_group_a_single_reward_and_equal_ones_stay_what_they_are() -> None:
    assert advantages_of([0.7], "reward").tolist() == [0.7]
    assert advantages_of([0.7] * 3, "reward").tolist() == [0.7] * 3


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("hidden", [1e6, math.nan, math.inf])
def test_mask_an_invalid_sample_gets_nothing_and_is_left_out_of_the_statistics(name: str, hidden: float) -> None:
    found = advantages_of([1.0, hidden, 0.0, hidden, 3.0], name, [True, False, True, False, True])
    expected = advantages_of([1.0, 0.0, 3.0], name, lengths=(LENGTHS[0], LENGTHS[2], LENGTHS[4]))
    assert found[[0, 2, 4]].tolist() == expected.tolist()
    assert found[[1, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", [name for name in COMPARISONS if name != "opo"])
def test_advantages_of_a_group_sum_to_zero_and_do_not_depend_on_its_order(name: str) -> None:
    rewards = [0.3, 1.0, 0.0, 0.7, 1.0]
    found = advantages_of(rewards, name)
    assert found.sum() == pytest.approx(0, abs=1e-14)
    np.testing.assert_allclose(advantages_of(rewards[::-1], name), found[::-1], rtol=1e-13)


def test_advantages_by_length_sum_to_zero_over_tokens_and_need_lengths() -> None:
    found = advantages_of([0.3, 1.0, 0.0, 0.7, 1.0], "opo")
    assert (found * LENGTHS[:5]).sum() == pytest.approx(0, abs=1e-13)
    with pytest.raises(ValueError, match="opo weighs rewards by the samples' lengths, which are not given"):
        group_advantages(np.array([0.0, 1.0]), np.ones(2, dtype=bool), estimator=ADVANTAGE_ESTIMATORS["opo"])


def test_with_a_greedy_answer_a_single_reward_and_equal_ones_teach_and_without_one_nothing_is_computed() -> None:
    assert advantages_of([1.0], "remax").tolist() == [0.25]
    assert advantages_of([0.0] * 3, "remax").tolist() == [-0.75] * 3
    assert [needs_baseline(name) for name in ("remax", "group_mean", "mine.py:f")] == [True, False, False]
    with pytest.raises(ValueError, match="remax compares rewards with that of a greedy answer, the baseline, which is"):
        group_advantages(np.array([0.0, 1.0]), np.ones(2, dtype=bool), estimator=ADVANTAGE_ESTIMATORS["remax"])
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="one finite number per valid sample"):
            group_advantages(np.array([1.0]), np.array([True]), estimator=ADVANTAGE_ESTIMATORS["remax"], baseline=bad)


def test_split_groups_do_not_see_each_other() -> None:
    # Advantages are made a group at a time: a group's are the same whatever groups come before it.
    before = advantages_of([1.0, 0.0], "group_norm").tolist()
    advantages_of([5.0, 9.0, 1.0], "group_norm")
    assert advantages_of([1.0, 0.0], "group_norm").tolist() == before


def test_the_rewards_given_are_not_changed_even_by_an_estimator_that_does() -> None:
    rewards = np.array([1.0, 0.0])

    def in_place(values: np.ndarray) -> np.ndarray:
        values -= values.mean()
        return values

    assert group_advantages(rewards, np.array([True, True]), estimator=in_place).tolist() == [0.5, -0.5]
    assert rewards.tolist() == [1.0, 0.0]


def test_an_estimator_of_the_users_own_decides_itself_about_equal_rewards() -> None:
    found = group_advantages(np.array([1.0, 1.0]), np.array([True, True]), estimator=lambda rewards: rewards - 0.25)
    assert found.tolist() == [0.75, 0.75]


def test_refusal_of_shapes_that_differ_and_rewards_that_are_no_numbers() -> None:
    estimator = ADVANTAGE_ESTIMATORS["group_norm"]
    for rewards, valid in ((np.zeros(3), np.ones(2)), (np.zeros((2, 1)), np.ones((2, 1)))):
        with pytest.raises(ValueError, match=r"must both have shape \[G\]"):
            group_advantages(rewards, valid.astype(bool), estimator=estimator)
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="rewards of valid samples must be finite"):
            advantages_of([bad, 1.0], "group_norm")


@pytest.mark.parametrize(
    "result",
    [[1.0], [[1.0, 0.0]], [1.0, math.nan], [1.0, 1e300], 3.0],
    ids=["one", "2d", "nan", "infinite as float32", "number"],
)
def test_refusal_of_an_estimator_that_does_not_give_one_finite_number_a_sample(result: object) -> None:
    with pytest.raises(ValueError, match="one finite number per valid sample"):
        group_advantages(np.array([1.0, 0.0]), np.array([True, True]), estimator=lambda _: result)
