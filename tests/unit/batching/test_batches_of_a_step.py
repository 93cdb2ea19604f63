"""Test what a batcher records of a step's trajectories, its tasks' rewards, and mini-batches' shares of the metrics."""

from dataclasses import replace
from typing import Any

import pytest

from coati_rl.algorithms.advantage import Estimator, group_mean, group_norm, reward
from coati_rl.batching.batcher import BatchSettings, StepBatcher
from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.sample_selection import SelectionSettings


def batcher_of(num_prompts: int, *, estimator: Estimator, **changes: Any) -> StepBatcher:
    """Of a step of so many prompts, in one mini-batch."""
    settings = BatchSettings(
        dp=1,
        train_batch_size=num_prompts,
        train_minibatch_size=num_prompts,
        train_microbatch_size=4,
        loss_variation="sample_level",
        advantage_estimator=estimator.__name__,
        rules=GroupRules(max_new_tokens=8),
    )
    return StepBatcher(replace(settings, **changes), step=0, learning_rate_progress=0.0, estimator=estimator)


def test_rewards_of_a_task_are_normalised_among_themselves(group_of: Any) -> None:
    small = group_of([(1.0, 1), (3.0, 1)], uid="p0")
    large = group_of([(100.0, 1), (300.0, 1)], uid="p1")
    batcher = batcher_of(2, estimator=reward, normalizes_rewards=True)
    batcher.add([small, replace(large, prompt=replace(large.prompt, task="large"))])
    low, high = -1 / 2**0.5, 1 / 2**0.5  # of two values: half their distance over their deviation
    expected = {("p0", 0): low, ("p0", 1): high, ("p1", 0): low, ("p1", 1): high}
    assert batcher.close().advantages == pytest.approx(expected, abs=1e-5)


def test_a_trajectory_whose_turns_have_advantages_of_their_own_is_recorded_with_their_mean(forked_group: Any) -> None:
    batcher = batcher_of(1, estimator=group_mean, rules=GroupRules(max_new_tokens=8, turn_discount=0.5))
    batcher.add([forked_group()])
    # Tokens of the first trajectory: two of the first turn, at 0.3125, and three of the second, at 0.
    expected = {("p0", 0): 0.3125 * 2 / 5, ("p0", 1): 0.0, ("p0", 2): -0.3125}
    assert batcher.close().advantages == pytest.approx(expected)


def test_each_mini_batch_has_its_share_of_the_samples_that_are_computed_for_the_metrics(group_of: Any) -> None:
    selection = SelectionSettings(min_tokens=0, seed=0)
    batcher = batcher_of(4, estimator=group_norm, train_minibatch_size=1, selection=selection)
    batches = [batcher.add([group_of([(1.0, 1)] * 4, uid=f"p{index}")]) for index in range(4)]
    assert [len(share.measured_samples.lengths) for (share,) in batches] == [2, 2, 2, 2], "8 samples of a step"
