"""Samples -> micro-batches: nothing lost, nothing doubled, nothing shared, padding as batch.py says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coati_rl.data.packing import Sample, blank_micro_batch, pack
from coati_rl.errors import RunError


def sample_of(length, first_token, number=0):
    """Tokens first_token, first_token + 1, ..., a third of them prompt; all else says the same."""
    values = np.arange(first_token, first_token + length)
    prompt, response = np.split(values, [length // 3])
    return Sample(
        uid="p7",
        number=number,
        prompt_ids=prompt,
        response_ids=response.astype(np.int32),
        loss_weight=number + 1.0,
        advantage=-number - 1.0,
        rollout_logprobs=-response.astype(np.float32) / 2,
        temperature=0.5,
        policy_versions=response.astype(np.int32),
    )


def sampled_tokens(lengths):
    """Token -> the number of its sample, for tokens of responses."""
    return {int(token): sample.number for sample in samples_of(lengths) for token in sample.response_ids}


def samples_of(lengths):
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return [sample_of(length, int(first), i) for i, (length, first) in enumerate(zip(lengths, firsts, strict=True))]


def pack_one(lengths, **options):
    """The micro-batches of a single rank."""
    (micro_batches,) = pack(samples_of(lengths), **options)
    return micro_batches


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=20)
OPTIONS = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 4),
        "max_samples": st.integers(1, 8),
        "max_tokens": st.sampled_from([None, 30, 64]),
        "one_sample_per_row": st.booleans(),
    }
)


@settings(deadline=None)
@given(LENGTHS, OPTIONS)
def test_every_token_is_on_exactly_one_rank_with_all_that_belongs_to_it(lengths, options):
    ranks = pack(samples_of(lengths), **options)
    real = [(m, m.sample_index >= 0) for micro_batches in ranks for m in micro_batches]
    tokens = np.concatenate([m.token_ids[is_real] for m, is_real in real])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    sampled = sampled_tokens(lengths)
    for m, is_real in real:
        in_response = is_real & np.isin(m.token_ids, list(sampled))
        tokens, numbers = m.token_ids[in_response], [sampled[token] for token in m.token_ids[in_response].tolist()]
        np.testing.assert_array_equal(m.loss_weights[in_response], np.array(numbers) + 1)
        np.testing.assert_array_equal(m.advantages[in_response], -np.array(numbers) - 1)
        np.testing.assert_array_equal(m.rollout_logprobs[in_response], -tokens / 2)
        np.testing.assert_array_equal(m.policy_version[in_response], tokens)
        np.testing.assert_array_equal(m.loss_mask, in_response)
        assert (m.temperature[in_response] == 0.5).all()


@settings(deadline=None)
@given(LENGTHS, OPTIONS)
def test_nothing_is_said_of_prompt_tokens_and_padding(lengths, options):
    for m in (m for micro_batches in pack(samples_of(lengths), **options) for m in micro_batches):
        for array in (m.loss_weights, m.advantages, m.rollout_logprobs):
            assert not array[~m.loss_mask].any()
        assert (m.temperature[~m.loss_mask] == 1).all()
        assert (m.policy_version[~m.loss_mask] == -1).all()


@settings(deadline=None)
@given(LENGTHS, OPTIONS)
def test_positions_restart_with_every_sample_which_stays_in_one_piece(lengths, options):
    samples = samples_of(lengths)
    for micro_batches in pack(samples, **options):
        pieces = []
        for m in micro_batches:
            for tokens, positions, indices in zip(m.token_ids, m.position_ids, m.sample_index, strict=True):
                starts = np.flatnonzero(positions == 0).tolist()
                for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
                    np.testing.assert_array_equal(positions[start:end], np.arange(end - start))
                    assert len(set(indices[start:end].tolist())) == 1
                    if indices[start] >= 0:
                        pieces.append((int(indices[start]), tokens[start:end].tolist()))
        pieces.sort()
        assert [index for index, _ in pieces] == list(range(len(pieces))), "numbered within the rank's share"
        whole = [[*sample.prompt_ids.tolist(), *sample.response_ids.tolist()] for sample in samples]
        places = [whole.index(tokens) for _, tokens in pieces]
        assert places == sorted(places), "in the order of the samples"


@settings(deadline=None)
@given(LENGTHS, OPTIONS)
def test_every_rank_gets_as_many_micro_batches_and_their_limits_are_kept(lengths, options):
    ranks = pack(samples_of(lengths), **options)
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    for m in (m for micro_batches in ranks for m in micro_batches if m.num_tokens):
        assert len(set(m.sample_index[m.sample_index >= 0].tolist())) <= options["max_samples"]
        assert m.token_ids.size <= (options["max_tokens"] or np.inf), "padding included"


@settings(deadline=None)
@given(LENGTHS, OPTIONS, st.integers(1, 4))
def test_the_samples_are_the_same_on_any_number_of_ranks(lengths, options, other):
    def tokens(num_ranks):
        ranks = pack(samples_of(lengths), **(options | {"num_ranks": num_ranks}))
        return sorted(np.concatenate([m.token_ids[m.sample_index >= 0] for ms in ranks for m in ms]).tolist())

    assert tokens(options["num_ranks"]) == tokens(other)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_padding_counts_nothing_and_is_a_sample_of_its_own(lengths, max_samples):
    for m in pack_one(lengths, max_samples=max_samples, one_sample_per_row=True):
        padding = m.sample_index < 0
        assert not m.token_ids[padding].any()
        assert not m.loss_mask[padding].any()
        for row, positions in zip(padding, m.position_ids, strict=True):
            assert positions[row].tolist() == list(range(row.sum()))
            assert sorted(row.tolist()) == row.tolist(), "it comes last"


def test_a_padded_micro_batch_by_hand():
    (m,) = pack_one([1, 3], max_samples=2, one_sample_per_row=True)
    assert m.token_ids.tolist() == [[0, 0, 0], [1, 2, 3]]
    assert m.position_ids.tolist() == [[0, 0, 1], [0, 1, 2]]
    assert m.sample_index.tolist() == [[0, -1, -1], [1, 1, 1]]
    assert m.loss_mask.tolist() == [[True, False, False], [False, True, True]]
    assert m.loss_weights.tolist() == [[1, 0, 0], [0, 2, 2]]
    assert m.advantages.tolist() == [[-1, 0, 0], [0, -2, -2]]
    assert m.temperature.tolist() == [[0.5, 1, 1], [1, 0.5, 0.5]]
    assert m.policy_version.tolist() == [[0, -1, -1], [-1, 2, 3]]
    assert m.num_tokens == 4


def test_a_packed_row_has_no_padding():
    (row,) = pack_one([3, 4], max_samples=2)
    assert row.token_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert row.sample_index.tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert row.num_tokens == 7


def test_long_and_short_samples_share_rows():
    rows = pack_one([10, 1, 9, 2], max_samples=2)
    assert sorted(row.token_ids.shape[1] for row in rows) == [11, 11]  # 10 + 1 and 9 + 2


def test_a_rank_without_a_sample_gets_a_blank_micro_batch():
    (first,), (second,) = pack(samples_of([3]), num_ranks=2, max_samples=4)
    assert (first.num_tokens, second.num_tokens) == (3, 0)
    assert second.token_ids.shape == (1, 2)


def test_a_blank_micro_batch_counts_nothing():
    blank = blank_micro_batch()
    assert not blank.loss_mask.any()
    assert not blank.loss_weights.any()
    assert blank.num_tokens == 0
    assert (blank.temperature == 1).all()


def test_no_samples_make_no_micro_batches():
    assert pack([], num_ranks=2, max_samples=4, max_tokens=8) == [(), ()]


@pytest.mark.parametrize("one_sample_per_row", [False, True])
def test_a_sample_that_exceeds_the_budget_is_named_with_the_way_out(one_sample_per_row):
    with pytest.raises(RunError) as caught:
        pack_one([3, 9, 2], max_samples=2, max_tokens=8, one_sample_per_row=one_sample_per_row)
    assert str(caught.value) == (
        "prompt p7, sample 1: 9 tokens exceed --max-tokens-per-microbatch 8; use 9 or more, or a smaller -mnt"
    )
    assert len(pack_one([3, 9, 2], max_samples=2, max_tokens=9)) == 2


@pytest.mark.parametrize("name", ["token_ids", "position_ids"])
@pytest.mark.parametrize("one_sample_per_row", [False, True])
def test_ids_have_the_dtype_that_an_embedding_takes(name, one_sample_per_row):
    (row,) = pack_one([3, 2], max_samples=2, one_sample_per_row=one_sample_per_row)
    assert getattr(row, name).dtype == np.int64
