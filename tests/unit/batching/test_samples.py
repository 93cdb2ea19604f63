"""Test that ragged samples are restored unchanged, and that shared data are sent once."""

import numpy as np
import pytest
from hypothesis import given

from coati_rl.samples import RaggedSamples, Sample
from tests.examples import examples
from tests.unit.batching.test_packing import LENGTHS, samples_of


def assert_split(ragged, samples):
    """What the samples were comes out."""
    split = ragged.split()
    assert [each.tolist() for each in split.prefix_ids] == [sample.prefix_ids.tolist() for sample in samples]
    assert [each.tolist() for each in split.token_ids] == [sample.token_ids.tolist() for sample in samples]
    assert [each.tolist() for each in split.loss_masks] == [sample.loss_mask.tolist() for sample in samples]
    assert list(split.lengths) == [len(sample) for sample in samples]
    assert list(split.num_loss_tokens) == [sample.num_loss_tokens for sample in samples]
    for name, arrays in split.arrays.items():
        for sample, array in zip(samples, arrays, strict=True):
            np.testing.assert_array_equal(np.broadcast_to(sample.arrays[name], sample.num_loss_tokens), array)


@examples(150)
@given(LENGTHS)
def test_ragged_samples_come_out_as_they_went_in(lengths):
    samples = samples_of(lengths)
    assert_split(RaggedSamples.of(samples), samples)


def test_ragged_samples_say_nothing_twice():
    prompt = np.arange(100, dtype=np.int32)
    samples = [
        Sample(
            uid="p",
            number=number,
            prefix_ids=prompt,
            token_ids=np.arange(400, dtype=np.int32),
            loss_mask=np.ones(400, dtype=bool),
            arrays={
                "rollout_logprobs": np.linspace(-2, -1, 400, dtype=np.float32),
                "policy_version": np.repeat(np.array([3, 4], np.int32), 200),
                "advantages": 1.5,
            },
        )
        for number in range(8)
    ]
    ragged = RaggedSamples.of(samples)
    assert ragged.prefix_ids.tolist() == prompt.tolist(), "once for all of them"
    assert ragged.arrays["policy_version"].runs == ((3, 200), (4, 200)) * 8
    assert ragged.arrays["advantages"].runs == ((1.5, 400),) * 8
    # 4 bytes a token, 4 a log-probability, a bit of mask, and runs
    assert 8.0 < ragged.num_bytes / (8 * 400 + 100) < 8.2
    assert_split(ragged, samples)


def test_a_sample_whose_first_token_nothing_predicts_is_refused():
    ids, mask = np.array([1, 2]), np.array([True, True])
    with pytest.raises(ValueError, match="row-3, sample 0: no token predicts the first one"):
        Sample(uid="row-3", number=0, prefix_ids=ids[:0], token_ids=ids, loss_mask=mask, arrays={})
    with pytest.raises(ValueError, match="rollout_logprobs has 1 entries for 2 loss tokens"):
        arrays = {"rollout_logprobs": np.zeros(1)}
        Sample(uid="p", number=0, prefix_ids=ids, token_ids=ids, loss_mask=mask, arrays=arrays)
