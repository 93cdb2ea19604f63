"""Test micro-batches: no sample is lost, doubled or shared, and padding is as batch.py defines it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.batching.packing import blank_micro_batch, pack, plan_batches
from coati_rl.errors import RunError
from coati_rl.samples import Sample
from tests.examples import examples


def sample_of(length, first_token, number=0):
    """Tokens first_token, first_token + 1, ..., a third of them prompt; all else says the same."""
    values = np.arange(first_token, first_token + length)
    prompt, response = np.split(values, [length // 3])
    return Sample(
        uid="p7",
        number=number,
        prefix_ids=prompt,
        token_ids=response.astype(np.int32),
        loss_mask=np.arange(len(response)) >= (not len(prompt)),  # nothing predicts a first token
        arrays={
            "loss_weights": number + 1.0,
            "advantages": -number - 1.0,
            "rollout_logprobs": -response[not len(prompt) :].astype(np.float32) / 2,
            "temperature": 0.5,
            "policy_version": response[not len(prompt) :].astype(np.int32),
        },
    )


def loss_tokens(lengths):
    """Token -> the number of its sample, for tokens that the loss counts."""
    return {int(t): sample.number for sample in samples_of(lengths) for t in sample.token_ids[sample.loss_mask]}


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


def sample_tokens(m):
    """Tokens that are not padding, row by row."""
    return np.concatenate(
        [m.token_ids[row, start : start + n] for row, start, n, _ in m.segments] or [np.empty(0, int)]
    )


@examples(150)
@given(LENGTHS, OPTIONS)
def test_every_token_is_on_exactly_one_rank_with_all_that_belongs_to_it(lengths, options):
    batches = [m for micro_batches in pack(samples_of(lengths), **options) for m in micro_batches]
    assert sorted(np.concatenate([sample_tokens(m) for m in batches]).tolist()) == list(range(sum(lengths)))
    number_of, found = loss_tokens(lengths), []
    for m in batches:
        mask, arrays = m.loss_arrays["loss_mask"], m.loss_arrays
        tokens = arrays["token_ids"][mask]
        found += tokens.tolist()
        numbers = np.array([number_of[token] for token in tokens.tolist()], dtype=int)
        np.testing.assert_array_equal(arrays["loss_weights"][mask], numbers + 1)
        np.testing.assert_array_equal(arrays["advantages"][mask], -numbers - 1)
        np.testing.assert_array_equal(arrays["rollout_logprobs"][mask], -tokens / 2)
        np.testing.assert_array_equal(arrays["policy_version"][mask], tokens)
        assert (arrays["temperature"][mask] == 0.5).all()
        before = np.take_along_axis(m.token_ids, arrays["sources"], axis=1)[mask]
        np.testing.assert_array_equal(before, tokens - 1, "the source of each token is the one before it")
    assert sorted(found) == sorted(number_of)


@examples(150)
@given(LENGTHS, OPTIONS)
def test_nothing_is_said_of_padding(lengths, options):
    for arrays in (m.loss_arrays for micro_batches in pack(samples_of(lengths), **options) for m in micro_batches):
        padding = ~arrays["loss_mask"]
        for name in ("loss_weights", "advantages", "rollout_logprobs", "token_ids"):
            assert not arrays[name][padding].any()
        assert (arrays["temperature"][padding] == 1).all()
        assert (arrays["policy_version"][padding] == -1).all()
        assert (arrays["sample_index"][padding] == -1).all()


@examples(150)
@given(LENGTHS, OPTIONS)
def test_positions_restart_with_every_sample_which_stays_in_one_piece(lengths, options):
    samples = samples_of(lengths)
    for micro_batches in pack(samples, **options):
        pieces, numbered = [], {}
        for m in micro_batches:
            for row, start, length, parent in m.segments.tolist():
                assert parent == -1
                np.testing.assert_array_equal(m.position_ids[row, start : start + length], np.arange(length))
                pieces.append(m.token_ids[row, start : start + length].tolist())
            indices = m.loss_arrays["sample_index"][m.loss_arrays["loss_mask"]]
            tokens = m.loss_arrays["token_ids"][m.loss_arrays["loss_mask"]]
            numbered |= dict(zip(tokens.tolist(), indices.tolist(), strict=True))
        whole = [[*sample.prefix_ids.tolist(), *sample.token_ids.tolist()] for sample in samples]
        held = sorted(whole.index(piece) for piece in pieces)
        for index, number in enumerate(held):  # numbered within the rank's share, in the order of the samples
            counted = samples[number].token_ids[samples[number].loss_mask].tolist()
            assert {numbered[token] for token in counted} <= {index}


@examples(150)
@given(LENGTHS, OPTIONS)
def test_every_rank_gets_as_many_micro_batches_and_their_limits_are_kept(lengths, options):
    ranks = pack(samples_of(lengths), **options)
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    for m in (m for micro_batches in ranks for m in micro_batches if m.num_tokens):
        assert len(m.segments) <= options["max_samples"]
        assert m.token_ids.size <= (options["max_tokens"] or np.inf), "padding included"


@examples(150)
@given(LENGTHS, OPTIONS, st.integers(1, 4))
def test_the_samples_are_the_same_on_any_number_of_ranks(lengths, options, other):
    def tokens(num_ranks):
        ranks = pack(samples_of(lengths), **(options | {"num_ranks": num_ranks}))
        return sorted(np.concatenate([sample_tokens(m) for ms in ranks for m in ms]).tolist())

    assert tokens(options["num_ranks"]) == tokens(other)


@examples(150)
@given(LENGTHS, st.integers(1, 8))
def test_padding_comes_last_and_has_positions_of_its_own(lengths, max_samples):
    for m in pack_one(lengths, max_samples=max_samples, one_sample_per_row=True):
        for row, start, length, _ in m.segments.tolist():
            assert start == 0
            assert not m.token_ids[row, length:].any()
            assert m.position_ids[row, length:].tolist() == list(range(m.token_ids.shape[1] - length))


def test_a_padded_micro_batch_by_hand():
    (m,) = pack_one([1, 4], max_samples=2, one_sample_per_row=True)
    assert m.token_ids.tolist() == [[0, 0, 0, 0], [1, 2, 3, 4]]
    assert m.position_ids.tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]
    assert m.segments.tolist() == [[0, 0, 1, -1], [1, 0, 4, -1]]
    assert {name: array.tolist() for name, array in m.loss_arrays.items()} == {
        "token_ids": [[0, 0, 0], [2, 3, 4]],
        "sources": [[0, 0, 0], [0, 1, 2]],
        "loss_mask": [[False] * 3, [True] * 3],
        "sample_index": [[-1] * 3, [1] * 3],
        "loss_weights": [[0] * 3, [2] * 3],
        "advantages": [[0] * 3, [-2] * 3],
        "rollout_logprobs": [[0] * 3, [-1, -1.5, -2]],
        "temperature": [[1] * 3, [0.5] * 3],
        "policy_version": [[-1] * 3, [2, 3, 4]],
    }
    assert m.num_tokens == 5


def test_a_mask_with_holes_leaves_tokens_out_of_the_loss_arrays():
    sample = Sample(
        uid="p",
        number=0,
        prefix_ids=np.array([7]),
        token_ids=np.array([10, 11, 12, 13, 14]),
        loss_mask=np.array([True, False, False, True, True]),
        arrays={"rollout_logprobs": np.array([-1, -2, -3], np.float32)},
    )
    ((m,),) = pack([sample], max_samples=1)
    assert m.token_ids.tolist() == [[7, 10, 11, 12, 13, 14]]
    assert m.loss_arrays["token_ids"].tolist() == [[10, 13, 14]]
    assert m.loss_arrays["sources"].tolist() == [[0, 3, 4]]
    assert m.loss_arrays["rollout_logprobs"].tolist() == [[-1, -2, -3]]


def test_a_packed_row_has_no_padding():
    (row,) = pack_one([3, 4], max_samples=2)
    assert row.token_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert row.segments.tolist() == [[0, 0, 3, -1], [0, 3, 4, -1]]
    assert row.loss_arrays["sample_index"].tolist() == [[0, 0, 1, 1, 1]]
    assert row.loss_arrays["sources"].tolist() == [[0, 1, 3, 4, 5]]
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
    assert not blank.loss_arrays["loss_mask"].any()
    assert not blank.loss_arrays["loss_weights"].any()
    assert blank.num_tokens == 0
    assert (blank.loss_arrays["temperature"] == 1).all()


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


@examples(150)
@given(LENGTHS.filter(lambda lengths: len(lengths) % 2 == 0), OPTIONS)
def test_samples_of_a_unit_stay_together_whatever_the_limits(lengths, options):
    options = options | {"max_samples": options["max_samples"] + 1, "max_tokens": options["max_tokens"] and 64}
    samples = samples_of(lengths)
    first_tokens = {int(np.append(s.prefix_ids, s.token_ids)[0]): s.number for s in samples}
    shares = plan_batches(samples, unit=2, **options)
    assert len({len(plan) for _, plan in shares}) == 1
    found = []
    for ragged, plan in shares:
        split = ragged.split()
        pairs = zip(split.prefix_ids, split.token_ids, strict=True)
        held = [first_tokens[int(np.append(prefix, own)[0])] for prefix, own in pairs]
        for bin_ in plan:
            numbers = [held[index] for index in bin_]
            assert len(numbers) <= options["max_samples"]
            assert numbers[1::2] == [number + 1 for number in numbers[::2]], "a pair, one after the other"
            assert all(number % 2 == 0 for number in numbers[::2])
            found += numbers
    assert sorted(found) == list(range(len(samples)))


def test_samples_that_are_no_whole_units_are_refused():
    with pytest.raises(ValueError, match="3 samples, 4 a micro-batch, cannot be kept in units of 2"):
        plan_batches(samples_of([1, 2, 3]), max_samples=4, unit=2)
    with pytest.raises(ValueError, match="2 samples, 1 a micro-batch, cannot be kept in units of 2"):
        plan_batches(samples_of([1, 2]), max_samples=1, unit=2)
