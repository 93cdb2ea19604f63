"""Make the samples of reward models: of pairs of responses, and of labelled steps.

A loss reads the model's output at the token before a loss token (`Sample`), so the token to read at is followed by one
that is in the loss.

Pairs (`reward_pair`): the reward is read at the last token that is not padding, as transformers'
`AutoModelForSequenceClassification` reads it; a padding token after it is the sample's only loss token. Where the
end-of-sequence token is the padding token, a response that ends with it is read at the token before. Samples 2k and
2k + 1 are the preferred and the other response.

Steps (`process_sample`): after each step stands a placeholder token, at which the model predicts the positive or the
negative label token; the token after it is the loss token, whatever its id.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coati_rl.errors import ConfigError
from coati_rl.samples import Sample


def padding_token_id(tokenizer: Any) -> int:
    """Return the tokenizer's padding token, else its end-of-sequence token. Raises: ConfigError if it has neither."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise ConfigError("the tokenizer has neither a padding nor an end-of-sequence token; set pad_token in its config")


def reward_pair(
    uid: str,
    prompt_ids: Sequence[int] | np.ndarray,
    chosen_ids: Sequence[int] | np.ndarray,
    rejected_ids: Sequence[int] | np.ndarray,
    *,
    pad_token_id: int,
    margin: float = 0.0,
) -> tuple[Sample, Sample]:
    """Return the samples of the preferred and of the other response, each one token longer than what it is read of.

    Args:
        uid: of the row, for messages.
        prompt_ids: [P] token ids that both share, at least one.
        chosen_ids: [T] token ids of the preferred response.
        rejected_ids: token ids of the other one.
        pad_token_id: the model's `config.pad_token_id`.
        margin: by how much the rewards should differ.
    Raises: ValueError if a response is empty or all padding.
    """
    prefix = np.asarray(prompt_ids, dtype=np.int64)
    first, second = (
        _reward_sample(uid, number, prefix, np.asarray(ids, dtype=np.int64), pad_token_id, margin)
        for number, ids in enumerate((chosen_ids, rejected_ids))
    )
    return first, second


def process_sample(
    uid: str, token_ids: Sequence[int] | np.ndarray, labels: Sequence[float], *, placeholder_id: int
) -> Sample:
    """Return the sample of a text with a placeholder after each step, at most one token longer.

    Args:
        uid: of the row, for messages.
        token_ids: [T] of prompt, steps and placeholders; a text that was cut has fewer placeholders than labels.
        labels: of each step, the probability that it is right: 0 or 1 if it is known.
        placeholder_id: token after each step.
    Raises: ValueError if there is no placeholder, fewer labels than placeholders, or a label is not in [0, 1].
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    places = np.flatnonzero(ids == placeholder_id)
    if not len(places) or len(places) > len(labels):
        raise ValueError(f"{uid}: {len(places)} placeholder tokens, {len(labels)} labels; each step needs one of each")
    step_label = np.array(labels[: len(places)], dtype=np.float32)
    if not ((step_label >= 0) & (step_label <= 1)).all():
        raise ValueError(f"{uid}: labels {list(labels)} must be in [0, 1]")
    ids = np.append(ids, placeholder_id) if places[-1] == len(ids) - 1 else ids
    loss_mask = np.zeros(len(ids), dtype=bool)
    loss_mask[places + 1] = True
    return Sample(
        uid=uid,
        number=0,
        prefix_ids=ids[:0],
        token_ids=ids,
        loss_mask=loss_mask,
        arrays={"loss_weights": 1.0, "temperature": 1.0, "step_label": step_label},
    )


def join_steps(prompt_ids: Sequence[int], steps: Sequence[Sequence[int]], *, placeholder_id: int) -> list[int]:
    """Return the token ids of prompt and steps, with a placeholder after each step."""
    return [*prompt_ids, *(token for step in steps for token in (*step, placeholder_id))]


def _reward_sample(
    uid: str, number: int, prefix: np.ndarray, ids: np.ndarray, pad_token_id: int, margin: float
) -> Sample:
    read = np.flatnonzero(ids != pad_token_id)
    if not len(read):
        raise ValueError(f"{uid}, response {number}: it has no token that is not padding")
    length = int(read[-1]) + 1
    return Sample(
        uid=uid,
        number=number,
        prefix_ids=prefix,
        token_ids=np.append(ids[:length], pad_token_id),
        loss_mask=np.arange(length + 1) == length,
        arrays={"loss_weights": 1.0, "temperature": 1.0, "margin": float(margin)},
    )
