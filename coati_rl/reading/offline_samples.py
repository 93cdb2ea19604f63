"""Make the samples of jobs on a dataset: of conversations and text, of pairs, and of labelled completions.

Longer sequences are cut at their end; a row of which no token is left to learn from is left out with all its samples.
Both are counted. Samples that a loss compares share the object of their prompt's ids, where the prompt ends with the
last token that they have in common before their completions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from coati_rl.errors import ConfigError
from coati_rl.reading.conversations import EncodedText, assistant_turns, encode_conversation, encode_text
from coati_rl.reading.forms import Content, Conversation, Form, Labelled, Messages, Pair, Rendered, Text
from coati_rl.samples import Sample

LossOn = Literal["assistant", "last", "all"]

_Unit = tuple[tuple[EncodedText, ...], tuple[dict[str, float], ...]]  # sequences, and arrays of their own
_NO_PREFIX = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineSamples:
    """Hold the samples of a dataset, unit by unit, in the order of their rows."""

    samples: tuple[Sample, ...]
    rows: tuple[int, ...]  # of each unit, the number of its form
    num_cut: int  # rows of which a sequence was cut
    num_left_out: int  # rows that lost all they would have taught

    def sizes(self, num_forms: Sequence[int]) -> tuple[int, ...]:
        """Return the number of units of each source, of which the forms stand one after the other."""
        ends = np.cumsum(num_forms)
        return tuple(np.diff(np.searchsorted(self.rows, ends), prepend=0).tolist())


def sft_samples(
    forms: Sequence[Form], tokenizer: Any, *, max_length: int, loss_on: LossOn = "assistant", first: int = 0
) -> OfflineSamples:
    """Return a sample of each conversation or text; the loss is over the tokens of the assistant's turns.

    Args:
        forms: Conversation or Text.
        tokenizer: a fast transformers tokenizer; with a chat template if there are conversations.
        max_length: tokens of a sample.
        loss_on: "assistant" all its turns, "last" the last of them, "all" every token; in each case without turns of
            weight 0. Of text it is the completion, or all that there is.
        first: number of the first form, by which samples are named.
    Raises: ConfigError naming the row of which the chat template makes no turns.
    """

    def encode(form: Form) -> tuple[EncodedText]:
        if isinstance(form, Text):
            encoded = encode_text(form.prompt, form.text, tokenizer)
        else:
            assert isinstance(form, Conversation)  # noqa: S101, of the job's formats
            encoded = _encode_turns(form, tokenizer, loss_on)
        if loss_on != "all":
            return (encoded,)
        every = np.ones(len(encoded.token_ids), dtype=bool) if isinstance(form, Text) else ~encoded.is_completion
        return (EncodedText(token_ids=encoded.token_ids, is_completion=every),)

    return _samples([(encode(form), ({},)) for form in forms], max_length, shares_prompt=False, first=first)


def _encode_turns(form: Conversation, tokenizer: Any, loss_on: LossOn) -> EncodedText:
    """Tokenise a conversation, with marks on the turns that are trained; with "all" on those that are not.

    Raises: ConfigError; it names --loss-on last where that would take the row.
    """
    encode = partial(_encode_messages, form.messages, tokenizer, form)
    trained = _trained_turns(form.messages)
    if loss_on == "all":
        return encode([index for index in assistant_turns(form.messages) if index not in trained])
    if loss_on == "last":
        return encode(trained[-1:])
    try:
        return encode(trained)
    except ConfigError as error:
        if len(trained) <= 1:
            raise
        try:
            encode(trained[-1:])
        except ConfigError:
            raise error from None
        raise ConfigError(f"{error}; or --loss-on last, which trains the last turn of every row alone") from error


def pair_samples(forms: Sequence[Form], tokenizer: Any, *, max_length: int) -> OfflineSamples:
    """Return two samples of each Pair: 2k of the chosen completion, 2k + 1 of the rejected one.

    Raises: ConfigError naming the row that the chat template refuses.
    """
    units: list[_Unit] = []
    for form in forms:
        assert isinstance(form, Pair)  # noqa: S101, of the job's formats
        completions = (form.chosen, form.rejected)
        both = tuple(_encode(form.prompt, completion, tokenizer, form) for completion in completions)
        units.append((both, ({}, {})))
    return _samples(units, max_length, shares_prompt=True)


def kto_samples(forms: Sequence[Form], tokenizer: Any, *, max_length: int) -> OfflineSamples:
    """Return two samples of each Labelled form, for KTO's loss and for its estimate of the KL divergence.

    Sample 2k has `label` 1.0 or 0.0. Sample 2k + 1 has -1.0: the same prompt with the completion of the next row that
    has another prompt.
    Raises: ConfigError naming the row that the chat template refuses, or if all prompts are the same.
    """
    units: list[_Unit] = []
    others = _next_with_another_prompt(forms)
    for form, other in zip(forms, others, strict=True):
        assert isinstance(form, Labelled) and isinstance(other, Labelled)  # noqa: S101, of the job's formats
        own = _encode(form.prompt, form.completion, tokenizer, form)
        completion = other.completion
        if isinstance(form.prompt, str) is not isinstance(completion, str):
            completion = _as_kind_of(form.prompt, completion)
        mismatched = _encode(form.prompt, completion, tokenizer, form)
        units.append(((own, mismatched), ({"label": float(form.label)}, {"label": -1.0})))
    return _samples(units, max_length, shares_prompt=True)


def _encode(prompt: Content, completion: Content, tokenizer: Any, row: Rendered) -> EncodedText:
    if isinstance(prompt, str) or isinstance(completion, str):
        assert isinstance(prompt, str) and isinstance(completion, str)  # noqa: S101, forms hold one kind
        return encode_text(prompt, completion, tokenizer)
    messages = (*prompt, *completion)
    return _encode_messages(messages, tokenizer, row, _trained_turns(messages, first=len(prompt)))


def _encode_messages(messages: Messages, tokenizer: Any, row: Rendered, turns: Sequence[int]) -> EncodedText:
    return encode_conversation(messages, tokenizer, turns=turns, tools=row.tools, options=row.options, where=row.where)


def _trained_turns(messages: Messages, first: int = 0) -> list[int]:
    """Return the indices of the assistant's messages that are trained, from message `first` on."""
    return [index for index in assistant_turns(messages, first) if messages[index].get("weight", 1)]


def _as_kind_of(prompt: Content, completion: Content) -> Content:
    """Return a completion as text beside text, as a message beside messages."""
    if isinstance(completion, str):
        return ({"role": "assistant", "content": completion},)
    return str(completion[-1].get("content", "")) if isinstance(prompt, str) else completion


def _next_with_another_prompt(forms: Sequence[Form]) -> list[Form]:
    """Return for each form the next one, around the end, whose prompt differs."""
    if not forms:
        return []
    prompts = [form.prompt for form in forms if isinstance(form, Labelled)]
    following: list[int] = [0] * len(forms)
    start = next((i for i in range(len(forms)) if prompts[i] != prompts[i - 1]), None)
    if start is None:
        where = getattr(forms[0], "where", "")
        raise ConfigError(
            f"{where}: all rows have the same prompt; KTO estimates the KL divergence with completions of other prompts"
        )
    for step in range(len(forms)):  # backwards from the first of a run of equal prompts
        index = (start - 1 - step) % len(forms)
        after = (index + 1) % len(forms)
        following[index] = after if prompts[after] != prompts[index] else following[after]
    return [forms[index] for index in following]


def _samples(
    units: Sequence[_Unit],
    max_length: int,
    *,
    shares_prompt: bool,
    first: int = 0,
) -> OfflineSamples:
    """Cut sequences, and make the samples of each unit."""
    samples, rows, num_cut = list[Sample](), list[int](), 0
    for number, (encoded, arrays) in enumerate(units, first):
        split = _common_prompt(encoded) if shares_prompt else 0
        masks = [_loss_mask(each, max_length) for each in encoded]
        if not all(mask[split:].any() for mask in masks):
            continue
        rows.append(number)
        num_cut += any(len(each.token_ids) > max_length for each in encoded)
        prefix = encoded[0].token_ids[:split] if split else _NO_PREFIX
        samples += [
            Sample(
                uid=f"row-{number}",
                number=place,
                prefix_ids=prefix,
                token_ids=each.token_ids[split:max_length],
                loss_mask=mask[split:],
                arrays={"loss_weights": 1.0, "temperature": 1.0, **own},
            )
            for place, (each, mask, own) in enumerate(zip(encoded, masks, arrays, strict=True))
        ]
    return OfflineSamples(
        samples=tuple(samples), rows=tuple(rows), num_cut=num_cut, num_left_out=len(units) - len(rows)
    )


def _loss_mask(encoded: EncodedText, max_length: int) -> np.ndarray:
    mask = encoded.is_completion[:max_length].copy()
    mask[:1] = False  # no token predicts the first one
    return mask


def _common_prompt(encoded: Sequence[EncodedText]) -> int:
    """Return the number of tokens that all sequences begin with, before the first of a completion."""
    length = min(int(np.argmax(each.is_completion)) for each in encoded)
    first = encoded[0].token_ids[:length]
    differing = [np.flatnonzero(each.token_ids[:length] != first) for each in encoded]
    return min([length, *(int(places[0]) for places in differing if len(places))])
