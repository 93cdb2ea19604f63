"""Test the plan and the layout of samples that share prefixes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.batching.packing import build_micro_batches, pack, plan_batches
from coati_rl.batching.prefix_tree import build_tree
from coati_rl.errors import RunError
from coati_rl.samples import Sample
from tests.examples import examples

PARTS = st.sampled_from([[1] * 9, [2], [3] * 8, [4, 5]])
RESPONSE = st.lists(PARTS, min_size=1, max_size=4).map(lambda parts: [token for part in parts for token in part])
GROUP = st.tuples(st.integers(1, 30), st.lists(RESPONSE, min_size=1, max_size=8))
GROUPS = st.lists(GROUP, min_size=1, max_size=6)
LIMITS = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 3),
        "num_stages": st.sampled_from([1, 1, 3]),
        "max_samples": st.integers(1, 12),
        "max_tokens": st.sampled_from([None, 70, 200]),
    }
)


def samples_of(groups):
    """Groups of one prompt each, which no two have in common; a number that tells a sample's arrays from others'."""
    samples = []
    for group, (num_prompt, responses) in enumerate(groups):
        prompt = np.arange(num_prompt) + 1000 * (group + 1)
        for number, response in enumerate(responses):
            values = np.arange(len(response)) + 100.0 * len(samples)
            samples.append(
                Sample(
                    uid=f"p{group}",
                    number=number,
                    prefix_ids=prompt,
                    token_ids=np.array(response, dtype=np.int32),
                    loss_mask=np.arange(len(response)) % 4 != 2,
                    arrays={"temperature": 1.0, "advantages": values[np.arange(len(response)) % 4 != 2]},
                )
            )
    return samples


def whole(sample):
    return [*sample.prefix_ids.tolist(), *sample.token_ids.tolist()]


def paths_of(m):
    """Each segment's places in the row, from its root."""
    paths = []
    for _, start, length, parent in m.segments.tolist():
        paths.append([*(paths[parent] if parent >= 0 else []), *range(start, start + length)])
    return paths


def held(ragged, plan):
    """The tokens of the samples of each micro-batch."""
    split = ragged.split()
    return [[[*split.prefix_ids[i].tolist(), *split.token_ids[i].tolist()] for i in bin_] for bin_ in plan]


def numbers_of(samples, **limits):
    """Each rank's micro-batches as lists of uids and numbers."""
    by_advantage = {float(s.arrays["advantages"][0]): f"{s.uid}.{s.number}" for s in samples}
    found = []
    for micro_batches in pack(samples, shares_prefixes=True, **limits):
        found.append([])
        for m in micro_batches:
            arrays = m.loss_arrays
            starts = np.unique(arrays["sample_index"][arrays["loss_mask"]], return_index=True)[1]
            found[-1].append([by_advantage[float(arrays["advantages"][0][start])] for start in sorted(starts)])
    return found


@examples(120)
@given(GROUPS, LIMITS)
def test_every_loss_token_is_there_once_with_its_path_its_place_and_all_that_belongs_to_it(groups, limits):
    samples = samples_of(groups)
    expected = {
        advantage: (whole(s), place)
        for s in samples
        for advantage, place in zip(
            s.arrays["advantages"].tolist(), len(s.prefix_ids) + np.flatnonzero(s.loss_mask), strict=True
        )
    }
    found = []
    for m in (m for micro_batches in pack(samples, shares_prefixes=True, **limits) for m in micro_batches):
        tokens, positions, arrays = m.token_ids[0], m.position_ids[0], m.loss_arrays
        for path in paths_of(m):
            assert positions[path].tolist() == [*range(len(path))], "positions are places in the sample"
        before = {path[-1]: path for path in paths_of(m)}
        of_place = {place: path[: path.index(place) + 1] for path in before.values() for place in path}
        for column in np.flatnonzero(arrays["loss_mask"][0]):
            advantage, source = float(arrays["advantages"][0, column]), int(arrays["sources"][0, column])
            sample, place = expected[advantage]
            assert arrays["token_ids"][0, column] == sample[place]
            assert tokens[of_place[source]].tolist() == sample[:place], "the source has seen what comes before"
            found.append(advantage)
    assert sorted(found) == sorted(expected), "a token that two samples share is there twice"


@examples(120)
@given(GROUPS, LIMITS)
def test_limits_hold_for_tokens_that_are_computed_and_only_the_budget_cuts_a_group(groups, limits):
    samples = samples_of(groups)
    plans = plan_batches(samples, shares_prefixes=True, **limits)
    assert len({len(plan) for _, plan in plans}) == 1
    for ragged, plan in plans:
        for m, bin_ in zip(build_micro_batches(ragged, plan), plan, strict=True):
            assert m.num_tokens <= (limits["max_tokens"] or np.inf)
            pieces = {int(ragged.piece_of[i]) for i in bin_}
            assert len(bin_) <= limits["max_samples"] or len(pieces) == 1, "more samples only if they share"
            for of_bin in held(ragged, [bin_]):
                numbered = [*zip(of_bin, (int(ragged.piece_of[i]) for i in bin_), strict=True)]
                trees = [build_tree([np.array(tokens) for tokens, p in numbered if p == piece]) for piece in pieces]
                assert m.num_tokens == sum(tree.num_tokens for tree in trees), "trainers build what was planned"
    if limits["num_ranks"] == limits["num_stages"] == 1 and limits["max_tokens"] is None:
        ((ragged, plan),) = plans
        prompts = [[tokens[0] for tokens in of_bin] for of_bin in held(ragged, plan)]
        for first in {tokens[0] for of_bin in held(ragged, plan) for tokens in of_bin}:
            num_prompt = next(len(s.prefix_ids) for s in samples if whole(s)[0] == first)
            assert num_prompt < 8 or sum(first in of_bin for of_bin in prompts) == 1, "a group is in one micro-batch"


@examples(120)
@given(GROUPS, LIMITS)
def test_the_plan_is_a_function_of_the_samples_and_loses_none(groups, limits):
    samples = samples_of(groups)
    first, again = (plan_batches(samples_of(groups), shares_prefixes=True, **limits) for _ in range(2))
    assert [plan for _, plan in first] == [plan for _, plan in again]
    found = [tokens for ragged, plan in first for of_bin in held(ragged, plan) for tokens in of_bin]
    assert sorted(found) == sorted(map(whole, samples))


@examples(120)
@given(GROUPS, LIMITS)
def test_samples_that_share_nothing_are_planned_and_laid_out_as_without_sharing(groups, limits):
    samples = samples_of([(num_prompt, responses[:1]) for num_prompt, responses in groups])
    shared, unshared = pack(samples, shares_prefixes=True, **limits), pack(samples, **limits)
    for left, right in zip(shared, unshared, strict=True):
        for one, other in zip(left, right, strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
            assert np.array_equal(one.segments, other.segments)
            for name in other.loss_arrays:
                assert np.array_equal(one.loss_arrays[name], other.loss_arrays[name])


def test_a_row_by_hand():
    """A prompt of eight tokens, a response of two, a copy of it, and another one."""
    samples = samples_of([(8, [[1, 2], [1, 2], [4]])])
    (row,) = pack(samples, shares_prefixes=True, max_samples=1)[0]
    prompt = [*range(1000, 1008)]
    assert row.token_ids.tolist() == [[*prompt, 1, 2, 1, 2, 4]], "two common tokens are not opened"
    assert row.position_ids.tolist() == [[*range(8), 8, 9, 8, 9, 8]]
    assert row.segments.tolist() == [[0, 0, 8, -1], [0, 8, 2, 0], [0, 10, 2, 0], [0, 12, 1, 0]]
    assert row.loss_arrays["token_ids"].tolist() == [[1, 2, 1, 2, 4]]
    assert row.loss_arrays["sources"].tolist() == [[7, 8, 7, 10, 7]]
    assert row.loss_arrays["sample_index"].tolist() == [[0, 0, 1, 1, 2]]
    assert row.num_tokens == 13


def test_few_samples_per_micro_batch_do_not_cut_a_group():
    samples = samples_of([(20, [[1], [2], [4, 5]]), (20, [[1], [2], [4, 5]])])
    assert numbers_of(samples, max_samples=2) == [[["p0.0", "p0.1", "p0.2"], ["p1.0", "p1.1", "p1.2"]]]
    assert len(numbers_of(samples, max_samples=6)[0]) == 1


def test_a_group_without_a_common_prefix_is_cut_as_before():
    samples = samples_of([(7, [[1], [2], [4, 5]])])
    assert len(numbers_of(samples, max_samples=2)[0]) == 2


def test_the_budget_cuts_a_group_into_the_largest_pieces_with_the_prompt_in_each():
    samples = samples_of([(20, [[1] * 5, [2] * 5, [4] * 5, [5] * 5, [6] * 5])])
    # Whole: 20 + 25 tokens. Three responses fit behind a prompt into 35.
    assert numbers_of(samples, max_samples=1, max_tokens=35) == [[["p0.0", "p0.1", "p0.2"], ["p0.3", "p0.4"]]]
    assert [m.num_tokens for m in pack(samples, shares_prefixes=True, max_samples=1, max_tokens=35)[0]] == [35, 30]


def test_a_cut_keeps_forks_of_an_episode_together():
    turn = [7] * 10
    samples = samples_of([(20, [[*turn, 1], [8] * 11, [*turn, 2]])])
    assert numbers_of(samples, max_samples=1, max_tokens=40) == [[["p0.0", "p0.2"], ["p0.1"]]]


def test_a_sample_that_exceeds_the_budget_is_named_and_a_group_that_does_is_not():
    samples = samples_of([(20, [[1] * 5, [2] * 9])])
    with pytest.raises(RunError, match="prompt p0, sample 1: 29 tokens exceed --max-tokens-per-microbatch 28"):
        pack(samples, shares_prefixes=True, max_samples=2, max_tokens=28)
    assert [m.num_tokens for m in pack(samples, shares_prefixes=True, max_samples=2, max_tokens=29)[0]] == [29, 25]


def test_a_group_is_cut_where_ranks_would_wait_for_it():
    one = samples_of([(10, [[1] * 20, [2] * 20, [4] * 20, [5] * 20])])
    assert numbers_of(one, max_samples=9, num_ranks=2) == [[["p0.0", "p0.1"]], [["p0.2", "p0.3"]]]
    two = samples_of([(10, [[1] * 20, [2] * 20])] * 2)
    assert numbers_of(two, max_samples=9, num_ranks=2) == [[["p0.0", "p0.1"]], [["p1.0", "p1.1"]]]
    three = samples_of([(10, [[1] * 20, [2] * 20])] * 3)
    ranks = numbers_of(three, max_samples=2, num_ranks=2)
    assert sorted(map(len, ranks)) == [2, 2]
    assert sorted(len(bin_) for rank in ranks for bin_ in rank) == [1, 1, 2, 2], "one of three is cut"


def sizes_of(samples, **limits):
    """The tokens of each rank's micro-batches."""
    return [[m.num_tokens for m in row] for row in pack(samples, shares_prefixes=True, **limits)]


def test_a_group_is_cut_where_pipeline_stages_would_wait_for_it():
    group = samples_of([(10, [[1] * 20, [2] * 20, [4] * 20, [5] * 20])])
    # m micro-batches take m + stages - 1 times the tokens of one: 2 * 90 as a whole, 3 * 50 in two parts.
    assert sizes_of(group, max_samples=2, num_stages=2) == [[50, 50]]
    assert sizes_of(group, max_samples=1, num_stages=4) == [[30] * 4], "7 * 30; 5 * 50 in two parts"
    assert sizes_of(group, max_samples=2, num_stages=4) == [[50, 50]], "more parts would share micro-batches"
    assert sizes_of(group, max_samples=1, num_stages=2, num_ranks=2) == [[30, 30], [30, 30]]
    assert sizes_of(group, max_samples=4, num_stages=2) == [[90]], "one micro-batch without sharing too"


def test_a_group_is_not_cut_for_stages_where_its_prompt_again_takes_longer_than_they_would_wait():
    group = samples_of([(900, [[1] * 20, [2] * 20, [4] * 20, [5] * 20])])
    assert sizes_of(group, max_samples=1, num_stages=2) == [[980]], "2 * 980; 3 * 940 in two parts"


def test_as_many_groups_as_stages_are_not_cut():
    groups = samples_of([(10, [[1] * 20, [2] * 20])] * 3)
    assert sizes_of(groups, max_samples=1, num_stages=3) == [[50, 50, 50]]
    assert sizes_of(groups, max_samples=1, num_stages=4) == [[30] * 6], "9 * 30; 6 * 50 whole"


def test_the_two_samples_of_a_unit_share_their_prompt():
    samples = samples_of([(20, [[1], [2, 2]]), (10, [[1], [2]])])
    (row,) = pack(samples, shares_prefixes=True, max_samples=4, unit=2)[0]
    assert row.num_tokens == 20 + 3 + 10 + 2
    assert row.segments[:, 3].tolist() == [-1, 0, 0, -1, 3, 3]


def test_padded_rows_share_nothing():
    samples = samples_of([(20, [[1], [2]])])
    (padded,) = pack(samples, shares_prefixes=True, max_samples=2, one_sample_per_row=True)[0]
    assert padded.token_ids.shape == (2, 21)
    assert padded.segments[:, 3].tolist() == [-1, -1]
