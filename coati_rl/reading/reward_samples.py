"""Make the samples of reward models: of pairs of completions, and of the labelled steps of solutions.

A loss reads the model's output at the token before a loss token (`Sample`), so the token to read at is followed by one
that is in the loss.

Pairs (`rm_samples`): the reward is read at the last token that is not padding, as transformers'
`AutoModelForSequenceClassification` reads it; a padding token after it is the sample's only loss token. Where the
end-of-sequence token is the padding token, a completion that ends with it is read at the token before. Samples 2k and
2k + 1 are the preferred and the other completion.

Steps (`prm_samples`): after each step stands a placeholder token, at which the model predicts the positive or the
negative label token; the token after it is the loss token, whatever its id.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coati_rl.errors import ConfigError
from coati_rl.reading.chat_template import apply_chat_template, check_options
from coati_rl.reading.conversations import leading_ids
from coati_rl.reading.forms import Form, Pair, Steps
from coati_rl.reading.offline_samples import OfflineSamples, pair_samples
from coati_rl.samples import Sample

_NO_PREFIX = np.empty(0, dtype=np.int32)


def rm_samples(forms: Sequence[Form], tokenizer: Any, *, max_length: int) -> OfflineSamples:
    """Return two samples of each Pair, with its margin; see `pair_samples`.

    Args:
        forms: Pair each.
        tokenizer: a fast transformers tokenizer, with a chat template if there are messages.
        max_length: tokens of a sample, the padding token included.
    Raises: ConfigError naming the row that the chat template refuses, or if the tokenizer has no padding token.
    """
    pad_token_id = padding_token_id(tokenizer)
    pairs = pair_samples(forms, tokenizer, max_length=max_length - 1)
    samples, rows = list[Sample](), list[int]()
    for number, chosen, rejected in zip(pairs.rows, pairs.samples[::2], pairs.samples[1::2], strict=True):
        form = forms[number]
        assert isinstance(form, Pair)  # noqa: S101, of the job's formats
        if all((sample.token_ids != pad_token_id).any() for sample in (chosen, rejected)):
            rows.append(number)
            samples += reward_pair(
                chosen.uid,
                chosen.prefix_ids,
                chosen.token_ids,
                rejected.token_ids,
                pad_token_id=pad_token_id,
                margin=form.margin,
            )
    return OfflineSamples(
        samples=tuple(samples), rows=tuple(rows), num_cut=pairs.num_cut, num_left_out=len(forms) - len(rows)
    )


def prm_samples(
    forms: Sequence[Form], tokenizer: Any, *, max_length: int, placeholder: str, reward_tokens: Sequence[str]
) -> OfflineSamples:
    """Return a sample of each Steps.

    A row that is one text is tokenised as it is, as OpenRLHF does; steps of a list are tokenised one by one, as TRL
    does, since a placeholder that is joined to a step's last word may not be a token of its own. A placeholder within
    the prompt or a step of a list has no label.

    Args:
        forms: Steps each.
        tokenizer: a fast transformers tokenizer, with a chat template if there are messages.
        max_length: tokens of a sample, which may end with one more placeholder than there are steps.
        placeholder: text of a single token.
        reward_tokens: texts of the labels, single tokens too.
    Raises: ConfigError if one of these is not a token, or naming the row in whose text, cut or not, the placeholder
        is not found as often as there are steps.
    """
    label_token_ids(tokenizer, reward_tokens)  # refused before anything starts
    placeholder_id = single_token_id(tokenizer, placeholder, "--placeholder-token")
    samples, rows, num_cut = list[Sample](), list[int](), 0
    for number, form in enumerate(forms):
        assert isinstance(form, Steps)  # noqa: S101, of the job's formats
        token_ids, places = _token_ids(form, tokenizer, placeholder, placeholder_id)
        cut = token_ids[: max_length - 1]
        kept = [place for place in places if place < len(cut)]
        if not kept:
            continue
        rows.append(number)
        num_cut += len(cut) < len(token_ids)
        samples.append(process_sample(f"row-{number}", cut, form.labels, places=kept))
    return OfflineSamples(
        samples=tuple(samples), rows=tuple(rows), num_cut=num_cut, num_left_out=len(forms) - len(rows)
    )


def label_token_ids(tokenizer: Any, reward_tokens: Sequence[str]) -> tuple[int, int]:
    """Return the ids of the tokens for a right and for a wrong step. Raises: ConfigError if one is not a token."""
    right, wrong = (single_token_id(tokenizer, text, "--reward-tokens") for text in reward_tokens)
    return right, wrong


def single_token_id(tokenizer: Any, text: str, flag: str) -> int:
    """Return the id of a text that is one token. Raises: ConfigError if it is not, naming the flag."""
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(token_ids) != 1 or token_ids[0] == tokenizer.unk_token_id:
        raise ConfigError(
            f"{flag} {text!r} is {len(token_ids)} tokens of this model, or unknown to it; name a text that is one token"
        )
    return int(token_ids[0])


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
    prefix = np.asarray(prompt_ids, dtype=np.int32)
    first, second = (
        _reward_sample(uid, number, prefix, np.asarray(ids, dtype=np.int32), pad_token_id, margin)
        for number, ids in enumerate((chosen_ids, rejected_ids))
    )
    return first, second


def process_sample(
    uid: str, token_ids: Sequence[int] | np.ndarray, labels: Sequence[float], *, places: Sequence[int] | np.ndarray
) -> Sample:
    """Return the sample of a text with a placeholder after each step, at most one token longer.

    Args:
        uid: of the row, for messages.
        token_ids: [T] of prompt, steps and placeholders.
        labels: of each step, the probability that it is right: 0 or 1 if it is known.
        places: of the placeholders after the steps, ascending; a text that was cut has fewer of them than labels.
    Raises: ValueError if there is no place, fewer labels than places, or a label is not in [0, 1].
    """
    ids = np.asarray(token_ids, dtype=np.int32)
    after = np.asarray(places, dtype=np.int64) + 1  # the loss tokens
    if not len(after) or len(after) > len(labels):
        raise ValueError(f"{uid}: {len(after)} placeholder tokens, {len(labels)} labels; each step needs one of each")
    step_label = np.array(labels[: len(after)], dtype=np.float32)
    if not ((step_label >= 0) & (step_label <= 1)).all():
        raise ValueError(f"{uid}: labels {list(labels)} must be in [0, 1]")
    if after[-1] == len(ids):
        ids = np.append(ids, int(ids[-1]))  # int64, as in the digests of checkpoints: another type is other data
    loss_mask = np.zeros(len(ids), dtype=bool)
    loss_mask[after] = True
    return Sample(
        uid=uid,
        number=0,
        prefix_ids=_NO_PREFIX,
        token_ids=ids,
        loss_mask=loss_mask,
        arrays={"loss_weights": 1.0, "temperature": 1.0, "step_label": step_label},
    )


def _token_ids(form: Steps, tokenizer: Any, placeholder: str, placeholder_id: int) -> tuple[list[int], list[int]]:
    """Return the tokens of prompt and steps, with a placeholder after each step, and the places of these."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    if form.prompt:
        prompt = form.prompt
        if not isinstance(prompt, str):
            check_options(tokenizer, form.options, form.where)
            given = {**form.options, "tools": list(form.tools) or None, "add_generation_prompt": True}
            prompt = apply_chat_template(tokenizer, prompt, form.where, tokenize=False, **given)
        token_ids, places = [*leading_ids(prompt, tokenizer), *encode(prompt)], list[int]()
        for step in form.steps:
            token_ids += [*encode(step), placeholder_id]
            places.append(len(token_ids) - 1)
        return token_ids, places
    text = "".join(step + placeholder for step in form.steps)
    token_ids = [*leading_ids(text, tokenizer), *encode(text)]
    places = [place for place, token_id in enumerate(token_ids) if token_id == placeholder_id]
    if len(places) != len(form.labels):
        raise ConfigError(
            f"{form.where}: its input has {placeholder!r} {len(places)} times as a token, and {len(form.labels)} "
            "labels; use a special token as --placeholder-token, or write the steps as a list (completions) after a "
            "prompt"
        )
    return token_ids, places


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
