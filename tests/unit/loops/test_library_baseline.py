"""Test the library's advantages and samples of completions that are compared with a greedy one."""

import pytest

import coati


class Completed:
    """A completion, whose sample is its advantage."""

    def sample(self, advantage):
        return advantage


def test_samples_may_be_compared_with_a_greedy_completion():
    assert coati.advantages([1.0, 0.0, float("nan")], "remax", baseline=0.25) == [0.75, -0.25, 0.0]
    completions = [Completed(), Completed(), Completed()]
    assert coati.group_samples(completions, [1.0, 0.0, float("nan")], "remax", baseline=0.25) == [0.75, -0.25]


def test_a_greedy_completion_that_could_not_be_scored_leaves_nothing_to_learn_from():
    assert coati.advantages([1.0, 0.0], "remax", baseline=float("nan")) == [0.0, 0.0]
    assert coati.group_samples([Completed(), Completed()], [1.0, 0.0], "remax", baseline=float("nan")) == []


def test_without_a_greedy_completion_nothing_is_computed():
    with pytest.raises(ValueError, match="the baseline, which is not given"):
        coati.advantages([1.0, 0.0], "remax")
