"""Samples -> packed rows: nothing lost, nothing doubled, nothing shared."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coati_rl.data.packing import Sample, pack


def sample_of(length, first_token):
    """Tokens first_token, first_token + 1, ...; every other array says the same in its own dtype."""
    values = np.arange(first_token, first_token + length)
    return Sample(
        token_ids=values.astype(np.int64),
        loss_mask=values % 2 == 0,
        loss_weights=values.astype(np.float32),
        advantages=-values.astype(np.float32),
        rollout_logprobs=-values.astype(np.float32) / 2,
        temperature=np.ones(length, dtype=np.float32),
        policy_version=values.astype(np.int32),
    )


def samples_of(lengths):
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return [sample_of(length, int(first)) for length, first in zip(lengths, firsts, strict=True)]


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=20)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_every_token_is_in_exactly_one_row_with_all_that_belongs_to_it(lengths, max_samples):
    rows = pack(samples_of(lengths), max_samples=max_samples)
    tokens = np.concatenate([row.token_ids[0] for row in rows])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    for row in rows:
        np.testing.assert_array_equal(row.loss_weights, row.token_ids)
        np.testing.assert_array_equal(row.advantages, -row.token_ids)
        np.testing.assert_array_equal(row.policy_version, row.token_ids)
        np.testing.assert_array_equal(row.loss_mask, row.token_ids % 2 == 0)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_positions_restart_with_every_sample_which_stays_in_one_piece(lengths, max_samples):
    samples = samples_of(lengths)
    for row in pack(samples, max_samples=max_samples):
        starts = np.flatnonzero(row.position_ids[0] == 0).tolist()
        for start, end in zip(starts, [*starts[1:], row.token_ids.shape[1]], strict=True):
            index = int(row.sample_index[0, start])
            np.testing.assert_array_equal(row.sample_index[0, start:end], index)
            np.testing.assert_array_equal(row.position_ids[0, start:end], np.arange(end - start))
            np.testing.assert_array_equal(row.token_ids[0, start:end], samples[index].token_ids)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_there_are_as_many_rows_as_max_samples_asks_for_and_none_holds_more(lengths, max_samples):
    rows = pack(samples_of(lengths), max_samples=max_samples)
    assert len(rows) == -(-len(lengths) // max_samples)
    counts = [len(np.unique(row.sample_index)) for row in rows]
    assert max(counts) <= max_samples and min(counts) >= 1


def test_long_and_short_samples_share_rows():
    rows = pack(samples_of([10, 1, 9, 2]), max_samples=2)
    assert sorted(row.token_ids.shape[1] for row in rows) == [11, 11]  # 10 + 1 and 9 + 2


def test_a_row_has_no_padding():
    (row,) = pack(samples_of([3, 4]), max_samples=2)
    assert row.token_ids.shape == (1, 7)
    assert row.num_tokens == 7


def test_no_samples_make_no_micro_batches():
    assert pack([], max_samples=4) == ()


@pytest.mark.parametrize("name", ["token_ids", "position_ids"])
def test_ids_have_the_dtype_that_an_embedding_takes(name):
    (row,) = pack(samples_of([3]), max_samples=1)
    assert getattr(row, name).dtype == np.int64
