"""Test bins: every sample once, within limits, equally many per rank, similar cost at every k."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.batching.balance import assign_to_bins
from tests.examples import examples

BUDGET = 40  # of the properties below; no sample is longer
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)
LIMITS = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 5),
        "max_samples": st.integers(1, 9),
        "max_tokens": st.sampled_from([None, BUDGET, 100]),
        "one_sample_per_row": st.booleans(),
    }
)


def cost(bin_, lengths, one_sample_per_row):
    """Count the tokens that a forward computes."""
    if one_sample_per_row:
        return len(bin_) * max((lengths[i] for i in bin_), default=0)
    return sum(lengths[i] for i in bin_)


def lognormal_lengths(count, seed=0):
    lengths = np.random.default_rng(seed).lognormal(4.2, 0.8, count)
    return [int(length) for length in lengths.clip(1, 512)]


@examples(150)
@given(LENGTHS, LIMITS)
def test_every_sample_is_in_exactly_one_bin_of_one_rank(lengths, limits):
    ranks = assign_to_bins(lengths, **limits)
    assert sorted(i for bins in ranks for bin_ in bins for i in bin_) == list(range(len(lengths)))


@examples(150)
@given(LENGTHS, LIMITS)
def test_every_rank_has_as_many_bins(lengths, limits):
    ranks = assign_to_bins(lengths, **limits)
    assert len(ranks) == limits["num_ranks"]
    assert len({len(bins) for bins in ranks}) == 1


@examples(150)
@given(LENGTHS, LIMITS)
def test_no_bin_exceeds_a_limit(lengths, limits):
    for bins in assign_to_bins(lengths, **limits):
        assert max(map(len, bins)) <= limits["max_samples"]
        if limits["max_tokens"] is not None:
            assert max(cost(bin_, lengths, limits["one_sample_per_row"]) for bin_ in bins) <= limits["max_tokens"]


@examples(150)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_without_a_token_limit_there_are_as_few_bins_as_the_samples_ask_for(lengths, ranks, samples, padded):
    bins, *_ = assign_to_bins(lengths, num_ranks=ranks, max_samples=samples, one_sample_per_row=padded)
    assert len(bins) == -(-len(lengths) // (samples * ranks))


@examples(150)
@given(LENGTHS, LIMITS)
def test_without_a_token_limit_a_bin_is_empty_only_if_the_others_hold_a_sample_each(lengths, limits):
    ranks = assign_to_bins(lengths, **(limits | {"max_tokens": None, "one_sample_per_row": False}))
    sizes = [len(bin_) for bins in ranks for bin_ in bins]
    assert min(sizes) > 0 or max(sizes) == 1


def test_the_longest_share_a_bin_with_the_shortest():
    assert assign_to_bins([10, 1, 9, 2], num_ranks=1, max_samples=2) == [[[0, 1], [2, 3]]]  # 11 and 11 tokens


def test_a_bin_that_has_all_its_samples_takes_no_more_however_light_it_is():
    (bins,) = assign_to_bins([10, 1, 1, 1, 1, 1], num_ranks=1, max_samples=2)
    assert sorted(map(len, bins)) == [2, 2, 2]


def test_no_rank_waits_in_an_empty_bin_while_others_have_several_samples():
    ranks = assign_to_bins([1] * 9, num_ranks=2, max_samples=4)  # three bins would do
    assert sorted(len(bin_) for bins in ranks for bin_ in bins) == [2, 2, 2, 3]


def test_padded_rows_are_cut_from_the_sorted_lengths():
    # 9, 10 | 1, 2: 2 * 10 + 2 * 2 = 24 tokens. 10, 1 | 9, 2 would be 2 * 10 + 2 * 9 = 38.
    assert assign_to_bins([10, 1, 9, 2], num_ranks=1, max_samples=2, one_sample_per_row=True) == [[[0, 2], [1, 3]]]


def test_padding_counts_against_the_token_limit():
    # 10 + 6 fit into 16, two rows of 10 do not.
    lengths = [10, 6]
    assert len(assign_to_bins(lengths, num_ranks=1, max_samples=2, max_tokens=16)[0]) == 1
    assert len(assign_to_bins(lengths, num_ranks=1, max_samples=2, max_tokens=16, one_sample_per_row=True)[0]) == 2


def test_at_every_k_the_ranks_have_about_the_same_work():
    # One sample a bin: 8 and 7 go together, then 4 and 3, and the rank with less so far gets the 4.
    assert assign_to_bins([3, 8, 4, 7], num_ranks=2, max_samples=1) == [[[1], [0]], [[3], [2]]]  # 8 + 3 and 7 + 4


def test_a_limit_too_tight_for_even_bins_is_still_kept():
    # Longest to lightest: 5 and 5, 4, then 3 and another 3 for 9 and 8 tokens: 11. First fit: 5 + 5 and 4 + 3 + 3.
    assert assign_to_bins([5, 5, 4, 3, 3], num_ranks=1, max_samples=9, max_tokens=10) == [[[0, 1], [2, 3, 4]]]


def test_fewer_samples_than_ranks_leave_empty_bins():
    assert assign_to_bins([5, 4, 3], num_ranks=4, max_samples=2) == [[[0]], [[1]], [[2]], [[]]]


def test_no_samples_make_no_bins():
    assert assign_to_bins([], num_ranks=3, max_samples=2) == [[], [], []]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("max_tokens", "padded"), [(None, False), (1024, False), (1024, True)])
def test_ranks_get_the_same_tokens_of_a_large_batch(num_ranks, max_tokens, padded):
    lengths = lognormal_lengths(1024)
    ranks = assign_to_bins(
        lengths, num_ranks=num_ranks, max_samples=16, max_tokens=max_tokens, one_sample_per_row=padded
    )
    work = np.array([[cost(bin_, lengths, padded) for bin_ in bins] for bins in ranks])
    assert work.sum(axis=1).max() <= 1.1 * work.sum(axis=1).mean(), "over the mini-batch"
    assert num_ranks * work.max(axis=0).sum() <= 1.1 * work.sum(), "in lockstep"
    tokens = np.array([sum(lengths[i] for bin_ in bins for i in bin_) for bins in ranks])
    assert tokens.max() <= 1.1 * tokens.mean()


def test_bins_of_a_large_batch_are_nearly_full():
    lengths = lognormal_lengths(1024)
    (bins,) = assign_to_bins(lengths, num_ranks=1, max_samples=1024, max_tokens=1024)
    assert len(bins) * 1024 <= 1.05 * sum(lengths)


def test_the_lightest_bin_takes_what_counts_for_several_samples_only_if_it_has_room_for_all():
    # The last one would be put to the 8 tokens of a bin that holds 3 of 4 samples.
    (bins,) = assign_to_bins([10, 9, 8, 1], num_ranks=1, max_samples=4, sizes=[1, 3, 3, 2])
    assert sorted(sorted(bin_) for bin_ in bins) == [[0, 3], [1], [2]]
