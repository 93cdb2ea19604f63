"""Test mini-batches: the weighted sum of a step is the mean, however the step is divided."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from coati_rl.algorithms.advantage import group_norm, reward
from coati_rl.batching.batcher import BatchSettings, StepBatcher
from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.packing import build_mini_batch
from coati_rl.batching.sample_selection import SelectionSettings

# Four prompts of two samples; (reward, response tokens). 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 = 36 tokens.
GROUPS = [[(1.0, 1), (0.0, 2)], [(1.0, 3), (0.0, 4)], [(1.0, 5), (0.0, 6)], [(0.0, 7), (1.0, 8)]]


@pytest.fixture
def batches_of(group_of):
    """All mini-batches of a step, by rank."""

    def batches(specifications, *, dp=1, tMbs, tmbs=2, variation="sample_level", order=None, rules=None, **layout):
        groups = [group_of(group, uid=f"p{index}") for index, group in enumerate(specifications)]
        groups = groups if order is None else [groups[index] for index in order]
        batcher = StepBatcher(
            BatchSettings(
                dp=dp,
                train_batch_size=len(groups) // dp,
                train_minibatch_size=tMbs,
                train_microbatch_size=tmbs,
                loss_variation=variation,
                advantage_estimator="group_norm",
                rules=GroupRules(**{"max_new_tokens": 8, **(rules or {})}),
                **layout,
            ),
            step=3,
            learning_rate_progress=0.25,
            estimator=group_norm,
        )
        size = tMbs * dp
        shares = [batcher.add(groups[start : start + size]) for start in range(0, len(groups), size)]
        return [[build_mini_batch(share) for share in mini_batch] for mini_batch in shares]

    return batches


def weighted_sum(batches, value):
    """loss_scale x the sum over all ranks of loss_weights x value(advantage)."""
    scales = {share.loss_scale for share in batches[-1]}
    assert len(scales) == 1
    rows = [row.loss_arrays for shares in batches for share in shares for row in share.micro_batches]
    return scales.pop() * sum(float((row["loss_weights"] * value(row))[row["loss_mask"]].sum()) for row in rows)


@pytest.mark.parametrize(
    ("dp", "tMbs", "tmbs"), [(1, 4, 8), (1, 4, 1), (1, 2, 3), (1, 1, 2), (2, 2, 4), (2, 1, 1), (4, 1, 2)]
)
@pytest.mark.parametrize(
    "layout", [{}, {"one_sample_per_row": True}, {"max_tokens_per_microbatch": 11}, {"shares_prefixes": True}]
)
def test_weights_and_scale_make_the_plain_mean_whatever_the_split(batches_of, dp, tMbs, tmbs, layout):
    batches = batches_of(GROUPS, dp=dp, tMbs=tMbs, tmbs=tmbs, **layout)
    assert weighted_sum(batches, lambda row: np.ones_like(row["advantages"])) == pytest.approx(1.0)
    # Mean over the 8 samples of their advantages, of which each group's cancel: +-0.7071.
    mean = weighted_sum(batches, lambda row: row["advantages"])
    assert mean == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("dp", "tMbs"), [(1, 4), (1, 1), (2, 1), (4, 1)])
def test_at_token_level_a_longer_sample_counts_for_more(batches_of, dp, tMbs):
    mean = weighted_sum(batches_of(GROUPS, dp=dp, tMbs=tMbs, variation="token_level"), lambda row: row["advantages"])
    # Right answers have 1 + 3 + 5 + 8 = 17 tokens, wrong ones 2 + 4 + 6 + 7 = 19: 0.70711 * (17 - 19) / 36.
    assert mean == pytest.approx(0.70711 * -2 / 36, abs=1e-5)


def test_samples_without_a_verdict_are_in_no_denominator(batches_of):
    groups = [[(1.0, 2), (0.0, 2), (9.0, 50, "invalid")], [(1.0, 3), (9.0, 0), (0.0, 1)]]
    (by_sample,), (by_token,) = (
        batches_of(groups, tMbs=2, variation=variation)[-1] for variation in ("sample_level", "token_level")
    )
    assert by_sample.loss_scale == 1 / 4
    assert by_token.loss_scale == 1 / 8


def test_samples_that_are_filtered_are_in_no_denominator(batches_of):
    rules = {"filter_range": (0.01, 0.99), "filter_truncated_response": True}
    # Three samples in the loss, of 2 + 3 + 1 tokens; the second group is always right.
    groups = [
        [(1.0, 2), (0.0, 3), (0.0, 8, "ok", "length")],
        [(1.0, 4), (1.0, 4)],
        [(0.0, 1), (1.0, 8, "ok", "length")],
    ]
    scales = {
        variation: batches_of(groups, tMbs=3, variation=variation, rules=rules)[-1][0].loss_scale
        for variation in ("sample_level", "token_level", "constant")
    }
    assert scales == {"sample_level": 1 / 3, "token_level": 1 / 6, "constant": 1 / 3}


@pytest.mark.parametrize("variation", ["sample_level", "token_level", "constant"])
@pytest.mark.parametrize(("dp", "tMbs"), [(1, 2), (1, 1), (2, 1)])
def test_a_step_without_a_sample_in_the_loss_has_scale_0_and_nothing_to_compute(batches_of, dp, tMbs, variation):
    groups = [[(1.0, 2), (1.0, 3)], [(0.0, 4), (0.0, 5)]]
    batches = batches_of(groups, dp=dp, tMbs=tMbs, variation=variation, rules={"filter_range": (0.01, 0.99)})
    assert {share.micro_batches for shares in batches for share in shares} == {()}
    assert [(share.is_last, share.loss_scale) for share in batches[-1]] == [(True, 0.0)] * dp


def test_a_mini_batch_without_a_sample_does_not_make_its_step_empty(batches_of):
    groups = [[(1.0, 2), (0.0, 3)], [(1.0, 4), (1.0, 5)]]
    (first,), (last,) = batches_of(groups, tMbs=1, rules={"filter_range": (0.01, 0.99)})
    assert (len(first.micro_batches), len(last.micro_batches)) == (1, 0)
    assert last.is_last and last.loss_scale == 1 / 2


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
        np.testing.assert_array_equal(one.loss_arrays["advantages"], other.loss_arrays["advantages"])


def test_ranks_get_as_many_tokens_whichever_prompt_they_belong_to(batches_of):
    (shares,) = batches_of(GROUPS, dp=2, tMbs=2)
    tokens = [sum(row.num_tokens for row in share.micro_batches) for share in shares]
    assert tokens == [30, 30]  # 8 prompts of 3 tokens, 36 tokens of responses
    assert [len(share.micro_batches) for share in shares] == [2, 2]


@pytest.mark.parametrize(
    "layout", [{}, {"one_sample_per_row": True}, {"max_tokens_per_microbatch": 11}, {"shares_prefixes": True}]
)
def test_a_mini_batch_holds_the_same_samples_on_any_number_of_ranks(batches_of, layout):
    def samples(dp):
        """Of each mini-batch: (advantage, weight of a token, response tokens) of its samples."""
        return [
            sorted(
                (*m["advantages"][here][-1:].tolist(), *m["loss_weights"][here][-1:].tolist(), int(here.sum()))
                for share in shares
                for m in (micro_batch.loss_arrays for micro_batch in share.micro_batches)
                for here in (m["sample_index"] == index for index in np.unique(m["sample_index"]) if index >= 0)
            )
            for shares in batches_of(GROUPS, dp=dp, tMbs=2 // dp, **layout)
        ]

    assert samples(1) == samples(2)
    assert [len(mini_batch) for mini_batch in samples(1)] == [4, 4]


def test_a_rank_without_a_valid_sample_still_takes_part(batches_of):
    (shares,) = batches_of([[(1.0, 2), (9.0, 5, "invalid")], [(9.0, 3, "invalid"), (9.0, 4, "invalid")]], dp=2, tMbs=1)
    assert [[m.num_tokens for m in share.micro_batches] for share in shares] == [[5], [0]]
    assert {share.loss_scale for share in shares} == {1.0}


def test_samples_may_have_rows_of_their_own(batches_of):
    ((share,),) = batches_of(GROUPS, tMbs=4, tmbs=4, one_sample_per_row=True)
    assert [m.token_ids.shape for m in share.micro_batches] == [(4, 11), (4, 7)]  # 11, 10, 9, 8 and 7, 6, 5, 4


def test_the_token_budget_asks_for_more_micro_batches(batches_of):
    ((free,),), ((bound,),) = (
        batches_of(GROUPS, tMbs=4, tmbs=8, max_tokens_per_microbatch=budget) for budget in (None, 20)
    )
    assert [m.num_tokens for m in free.micro_batches] == [60]
    assert [m.num_tokens for m in bound.micro_batches] == [15, 15, 15, 15]  # 11 + 4, 10 + 5, 9 + 6, 8 + 7


@pytest.mark.parametrize(("variation", "scale"), [("sample_level", 1 / 2), ("token_level", 1 / 8)])
def test_a_forked_episode_counts_once_and_so_does_each_of_its_tokens(forked_group, variation, scale):
    settings = BatchSettings(
        dp=1,
        train_batch_size=1,
        train_minibatch_size=1,
        train_microbatch_size=4,
        loss_variation=variation,
        advantage_estimator="group_norm",
        rules=GroupRules(max_new_tokens=8),
    )
    batcher = StepBatcher(settings, step=0, learning_rate_progress=0.0, estimator=group_norm)
    (share,) = batcher.add([forked_group()])  # two episodes, of 5 + 1 and of 2 tokens, in three samples
    batches = [[build_mini_batch(share)]]
    assert batches[0][0].loss_scale == scale
    assert weighted_sum(batches, lambda row: np.ones_like(row["advantages"])) == pytest.approx(1.0)


def test_rewards_are_normalised_over_the_valid_samples_of_a_mini_batch(group_of):
    groups = [group_of([(1.0, 1), (3.0, 1)], uid="p0"), group_of([(5.0, 1), (7.0, 1), (-9.0, 1, "invalid")], uid="p1")]
    batcher = StepBatcher(
        BatchSettings(
            dp=1,
            train_batch_size=2,
            train_minibatch_size=2,
            train_microbatch_size=2,
            loss_variation="token_level",
            advantage_estimator="reward",
            rules=GroupRules(max_new_tokens=8),
            normalizes_rewards=True,
            reward_clip=(-1.0, 1.0),
        ),
        step=0,
        learning_rate_progress=0.0,
        estimator=reward,
    )
    batcher.add(groups)
    # 1, 3, 5, 7: mean 4, deviation sqrt(20 / 3) = 2.582: -1.162, -0.387, 0.387, 1.162, and clipped
    expected = {("p0", 0): -1.0, ("p0", 1): -0.3873, ("p1", 0): 0.3873, ("p1", 1): 1.0}
    assert batcher.close().advantages == pytest.approx(expected, abs=1e-4)
    assert [score.reward for group in batcher.close().groups for score in group.scores][:2] == [1.0, 3.0], "as recorded"


MIXED = [*GROUPS, [(1.0, 9), (1.0, 2)], [(0.0, 3), (0.0, 4)], [(1.0, 5), (1.0, 6)], [(0.0, 7), (0.0, 8)]]


def samples_in(batches):
    """The (advantage, response tokens) of all samples, by micro-batch."""
    return [
        sorted(
            (float(m.loss_arrays["advantages"][here][0]), int(here.sum()))
            for here in (m.loss_arrays["sample_index"] == index for index in range(16))
            if here.any()
        )
        for shares in batches
        for share in shares
        for m in share.micro_batches
    ]


@pytest.mark.parametrize(
    ("dp", "tMbs", "variation"),
    [(1, 8, "sample_level"), (1, 2, "token_level"), (2, 4, "constant"), (2, 1, "sample_level"), (4, 1, "token_level")],
)
def test_samples_of_advantage_0_are_left_out_and_stay_in_the_denominator(batches_of, dp, tMbs, variation):
    few = SelectionSettings(min_tokens=0, seed=0)
    for order in (None, [6, 1, 4, 3, 2, 5, 0, 7]):
        layout = {"dp": dp, "tMbs": tMbs, "variation": variation, "order": order}
        whole, chosen = (batches_of(MIXED, **layout, selection=selection) for selection in (None, few))
        assert {share.loss_scale for share in whole[-1]} == {share.loss_scale for share in chosen[-1]}
        for value in (lambda row: row["advantages"], lambda row: row["advantages"] ** 2):
            assert weighted_sum(chosen, value) == pytest.approx(weighted_sum(whole, value), abs=1e-6)
        for shares in chosen:
            assert len({len(share.micro_batches) for share in shares}) == 1, "a pipeline waits for the others"
        found = sorted(sample for each in samples_in(chosen) for sample in each)
        expected = sorted(sample for each in samples_in(whole) for sample in each)
        assert [sample for sample in found if sample[0]] == [sample for sample in expected if sample[0]]
        assert all(count <= expected.count(sample) for sample, count in Counter(found).items())
        assert 8 <= len(found) < len(expected) == 16


def test_what_is_computed_for_the_metrics_alone_has_micro_batches_of_its_own(batches_of):
    everything = SelectionSettings(min_tokens=1000, seed=0)
    (shares,) = batches_of(MIXED, dp=2, tMbs=4, tmbs=3, selection=everything)
    kinds = [[{bool(advantage) for advantage, _ in each} for each in samples_in([[share]])] for share in shares]
    assert kinds == [[{True}, {True}, {False}, {False}]] * 2
    (trained,) = batches_of(GROUPS, dp=2, tMbs=2, tmbs=3, selection=SelectionSettings(min_tokens=0, seed=0))
    for share, expected in zip(shares, trained, strict=True):
        for one, other in zip(share.micro_batches, expected.micro_batches, strict=False):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)


@pytest.mark.parametrize("tMbs", [1, 2])
@pytest.mark.parametrize("dp", [2, 4])
def test_the_first_rank_which_measures_the_mismatch_has_its_share_of_the_tokens_that_are_computed(batches_of, dp, tMbs):
    for seed in range(8):
        selection = SelectionSettings(min_tokens=dp * 12, seed=seed)
        mini_batches = batches_of(MIXED, dp=dp, tMbs=tMbs, selection=selection)
        of_first = [int(m.loss_arrays["loss_mask"].sum()) for shares in mini_batches for m in shares[0].micro_batches]
        assert sum(of_first) >= 12


def test_what_is_computed_is_counted_by_episodes_and_not_by_their_forks(forked_group):
    settings = BatchSettings(
        dp=1,
        train_batch_size=2,
        train_minibatch_size=2,
        train_microbatch_size=4,
        loss_variation="sample_level",
        advantage_estimator="group_norm",
        rules=GroupRules(max_new_tokens=8),
    )
    counts = []
    for selection in (None, SelectionSettings(min_tokens=0, seed=0)):
        batcher = StepBatcher(
            replace(settings, selection=selection), step=0, learning_rate_progress=0.0, estimator=group_norm
        )
        batcher.add([forked_group(uid="p0"), forked_group(uid="p1", rewards=(1.0, 1.0))])
        counts.append(batcher.close().num_computed)
    assert counts == [4, 4], "in six trajectories, all of which are computed"
