"""Test where the samples of reward models are read: at the last token that is no padding, and after each step."""

import numpy as np
import pytest

from coati_rl.data.packing import pack
from coati_rl.data.reward_samples import join_steps, padding_token_id, process_sample, reward_pair
from coati_rl.errors import ConfigError

PAD, MARK = 0, 9


class Tokenizer:
    def __init__(self, pad: int | None, eos: int | None) -> None:
        self.pad_token_id, self.eos_token_id = pad, eos


def test_a_pair_is_read_at_the_last_token_of_each_response() -> None:
    chosen, rejected = reward_pair("row-0", [5, 6], [7, 8], [7], pad_token_id=PAD, margin=0.5)
    assert chosen.prefix_ids is rejected.prefix_ids
    assert (chosen.token_ids.tolist(), rejected.token_ids.tolist()) == ([7, 8, PAD], [7, PAD])
    assert (chosen.loss_mask.tolist(), rejected.loss_mask.tolist()) == ([False, False, True], [False, True])
    assert chosen.arrays == {"loss_weights": 1.0, "temperature": 1.0, "margin": 0.5}
    (micro_batch,) = pack([chosen, rejected], max_samples=2, unit=2)[0]
    assert micro_batch.token_ids.tolist() == [[5, 6, 7, 8, PAD, 5, 6, 7, PAD]]
    assert micro_batch.loss_arrays["sources"].tolist() == [[3, 7]]
    assert micro_batch.loss_arrays["margin"].tolist() == [[0.5, 0.5]]


def test_padding_at_the_end_of_a_response_is_not_read_as_transformers_does_not() -> None:
    """As where the end-of-sequence token is the padding token."""
    chosen, _ = reward_pair("row-0", [5], [7, PAD, 8, PAD, PAD], [7], pad_token_id=PAD)
    assert chosen.token_ids.tolist() == [7, PAD, 8, PAD]
    assert np.flatnonzero(chosen.loss_mask).tolist() == [3]


def test_a_response_without_a_token_to_read_at_is_refused() -> None:
    for response in ([], [PAD, PAD]):
        with pytest.raises(ValueError, match="row-3, response 1: it has no token"):
            reward_pair("row-3", [5], [7], response, pad_token_id=PAD)


def test_the_padding_token_is_the_tokenizers_own_or_its_end_of_sequence() -> None:
    assert padding_token_id(Tokenizer(pad=3, eos=2)) == 3
    assert padding_token_id(Tokenizer(pad=None, eos=2)) == 2
    with pytest.raises(ConfigError, match="pad_token"):
        padding_token_id(Tokenizer(pad=None, eos=None))


def test_each_step_is_read_at_its_placeholder() -> None:
    token_ids = join_steps([1, 2], [[3], [4, 5]], placeholder_id=MARK)
    assert token_ids == [1, 2, 3, MARK, 4, 5, MARK]
    sample = process_sample("row-0", token_ids, [1.0, 0.25], placeholder_id=MARK)
    assert sample.token_ids.tolist() == [*token_ids, MARK]  # one more, as a loss token follows the place it is read at
    assert np.flatnonzero(sample.loss_mask).tolist() == [4, 7]
    assert sample.arrays["step_label"].tolist() == [1.0, 0.25]
    (micro_batch,) = pack([sample], max_samples=1)[0]
    assert micro_batch.token_ids[0, micro_batch.loss_arrays["sources"][0]].tolist() == [MARK, MARK]


def test_a_text_that_was_cut_keeps_the_labels_of_the_steps_that_are_left() -> None:
    sample = process_sample("row-0", [1, MARK, 4], [0.0, 1.0], placeholder_id=MARK)
    assert sample.token_ids.tolist() == [1, MARK, 4]
    assert sample.arrays["step_label"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("token_ids", "labels", "message"),
    [
        ([1, 2], [1.0], "0 placeholder tokens, 1 labels"),
        ([1, MARK, 2, MARK], [1.0], "2 placeholder tokens, 1 labels"),
        ([1, MARK], [1.5], r"must be in \[0, 1\]"),
    ],
)
def test_steps_and_labels_that_do_not_fit_are_refused(token_ids: list[int], labels: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=f"row-4: .*{message}"):
        process_sample("row-4", token_ids, labels, placeholder_id=MARK)
