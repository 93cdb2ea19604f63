"""Groups -> mini-batches: the weighted sum of a step is the plain mean, however the step is cut up."""

import numpy as np
import pytest

from coati_rl.data.batcher import BatchSettings, StepBatcher, rollout_statistics

# Four prompts of two samples; (reward, response tokens). 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 = 36 tokens.
GROUPS = [[(1.0, 1), (0.0, 2)], [(1.0, 3), (0.0, 4)], [(1.0, 5), (0.0, 6)], [(0.0, 7), (1.0, 8)]]


@pytest.fixture
def batches_of(group_of):
    """All mini-batches of a step, by rank."""

    def batches(specifications, *, dp=1, tMbs, tmbs=2, variation="sample_level", order=None):
        groups = [group_of(group, uid=f"p{index}") for index, group in enumerate(specifications)]
        groups = groups if order is None else [groups[index] for index in order]
        batcher = StepBatcher(
            BatchSettings(
                dp=dp,
                train_batch_size=len(groups) // dp,
                train_minibatch_size=tMbs,
                train_microbatch_size=tmbs,
                loss_variation=variation,
                recompute_old_logprobs=False,
            ),
            step=3,
            learning_rate_progress=0.25,
        )
        size = tMbs * dp
        return [batcher.add(groups[start : start + size]) for start in range(0, len(groups), size)]

    return batches


def weighted_sum(batches, value):
    """loss_scale x the sum over all ranks of loss_weights x value(advantage)."""
    scales = {share.loss_scale for share in batches[-1]}
    assert len(scales) == 1
    rows = [row for shares in batches for share in shares for row in share.micro_batches]
    return scales.pop() * sum(float((row.loss_weights * value(row))[row.loss_mask].sum()) for row in rows)


@pytest.mark.parametrize(
    ("dp", "tMbs", "tmbs"), [(1, 4, 8), (1, 4, 1), (1, 2, 3), (1, 1, 2), (2, 2, 4), (2, 1, 1), (4, 1, 2)]
)
def test_weights_and_scale_make_the_plain_mean_whatever_the_split(batches_of, dp, tMbs, tmbs):
    ones = weighted_sum(batches_of(GROUPS, dp=dp, tMbs=tMbs, tmbs=tmbs), lambda row: np.ones_like(row.advantages))
    assert ones == pytest.approx(1.0)
    # Mean over the 8 samples of their advantages, of which each group's cancel: +-0.7071.
    mean = weighted_sum(batches_of(GROUPS, dp=dp, tMbs=tMbs, tmbs=tmbs), lambda row: row.advantages)
    assert mean == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("dp", "tMbs"), [(1, 4), (1, 1), (2, 1), (4, 1)])
def test_at_token_level_a_longer_sample_counts_for_more(batches_of, dp, tMbs):
    mean = weighted_sum(batches_of(GROUPS, dp=dp, tMbs=tMbs, variation="token_level"), lambda row: row.advantages)
    # Right answers have 1 + 3 + 5 + 8 = 17 tokens, wrong ones 2 + 4 + 6 + 7 = 19: 0.70711 * (17 - 19) / 36.
    assert mean == pytest.approx(0.70711 * -2 / 36, abs=1e-5)


def test_samples_without_a_verdict_are_in_no_denominator(batches_of):
    groups = [[(1.0, 2), (0.0, 2), (9.0, 50, "invalid")], [(1.0, 3), (9.0, 0), (0.0, 1)]]
    (by_sample,), (by_token,) = (
        batches_of(groups, tMbs=2, variation=variation)[-1] for variation in ("sample_level", "token_level")
    )
    assert by_sample.loss_scale == 1 / 4
    assert by_token.loss_scale == 1 / 8


def test_only_the_last_mini_batch_closes_the_step(batches_of):
    batches = batches_of(GROUPS, tMbs=1)
    assert [share.is_last for (share,) in batches] == [False, False, False, True]
    assert batches[-1][0].loss_scale == 1 / 8
    assert {share.step for (share,) in batches} == {3}
    assert {share.learning_rate_progress for (share,) in batches} == {0.25}


def test_the_batch_does_not_depend_on_which_prompt_finished_first(batches_of):
    (first,), (second,) = (batches_of(GROUPS, tMbs=4, order=order)[0] for order in ([0, 1, 2, 3], [3, 1, 0, 2]))
    for one, other in zip(first.micro_batches, second.micro_batches, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.advantages, other.advantages)


def test_every_rank_gets_as_many_prompts(batches_of):
    (shares,) = batches_of(GROUPS, dp=2, tMbs=2)
    tokens = [sum(int(row.loss_mask.sum()) for row in share.micro_batches) for share in shares]
    assert tokens == [1 + 2 + 5 + 6, 3 + 4 + 7 + 8]


def test_rollout_statistics_are_means_over_what_was_scored(group_of):
    groups = [
        group_of([(1.0, 2), (0.0, 4)], version=5),
        group_of([(0.5, 6), (9.0, 8, "invalid")], version=3, finish_reason="length"),
    ]
    record = rollout_statistics(groups, {5: 0, 3: 1}.__getitem__)
    assert record["reward_mean"] == 0.5  # of 1.0, 0.0, 0.5
    assert record["answer_accuracy"] == pytest.approx(2 / 3)  # a reward above 0 is a correct answer here
    assert record["samples_invalid"] == 1
    assert record["response_tokens_mean"] == 5.0  # (2 + 4 + 6 + 8) / 4
    assert record["truncated_fraction"] == 0.5
    assert record["staleness_mean"] == 14 / 20  # by tokens
    assert record["staleness_max"] == 1
    assert record["num_prompt_tokens"] == 4 * 3
    assert record["num_response_tokens"] == 20
