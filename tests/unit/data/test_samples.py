"""Test that ragged samples are restored unchanged, and that shared data are sent once."""

import numpy as np
import pytest
from hypothesis import given, settings

from coati_rl.samples import RaggedSamples, Sample
from tests.unit.data.test_packing import LENGTHS, samples_of


def equal_samples(first, second):
    assert first.prefix_ids.tolist() == second.prefix_ids.tolist()
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.loss_mask.tolist() == second.loss_mask.tolist()
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(np.broadcast_to(array, first.num_loss_tokens), second.arrays[name])


@settings(deadline=None)
@given(LENGTHS)
def test_ragged_samples_come_out_as_they_went_in(lengths):
    samples = samples_of(lengths)
    split = RaggedSamples.of(samples).split()
    assert [len(sample) for sample in split] == lengths
    for first, second in zip(samples, split, strict=True):
        equal_samples(first, second)


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
    for first, second in zip(samples, ragged.split(), strict=True):
        equal_samples(first, second)


def test_a_sample_whose_first_token_nothing_predicts_is_refused():
    ids, mask = np.array([1, 2]), np.array([True, True])
    with pytest.raises(ValueError, match="row-3, sample 0: no token predicts the first one"):
        Sample(uid="row-3", number=0, prefix_ids=ids[:0], token_ids=ids, loss_mask=mask, arrays={})
    with pytest.raises(ValueError, match="rollout_logprobs has 1 entries for 2 loss tokens"):
        arrays = {"rollout_logprobs": np.zeros(1)}
        Sample(uid="p", number=0, prefix_ids=ids, token_ids=ids, loss_mask=mask, arrays=arrays)
