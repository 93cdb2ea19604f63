"""Tokenise conversations and plain text, and find the tokens of the assistant's turns.

A conversation is rendered whole by the chat template and tokenised once, so that no token depends on where a text is
divided. Its turns are those that the template marks with {% generation %}; without marks, a turn's characters are those
that it adds to the rendered conversation before it, and its tokens those that start among them, up to the special token
that ends the turn. A prompt and a completion of plain text are joined and tokenised once too.

T tokens of a sequence.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coati_rl.errors import ConfigError
from coati_rl.reading.chat_template import apply_chat_template, check_options, template_of
from coati_rl.reading.forms import Message, Messages
from coati_rl.reading.special_tokens import length_of_turn

NO_OPTIONS: Mapping[str, Any] = {}

_MARKS = re.compile(r"\{%-?\s*generation\b")
_REMEDY = "use a --chat-template that only adds text, or one that marks the turns with {% generation %}"
_LONGEST_QUOTE = 60  # characters of a template's text in messages


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedText:
    """Hold the tokens of a sequence."""

    token_ids: np.ndarray  # int32[T]
    is_completion: np.ndarray  # bool[T], True on tokens of the turns that were asked for, or of the completion


def encode_conversation(
    messages: Messages,
    tokenizer: Any,
    *,
    turns: Sequence[int],
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] = NO_OPTIONS,
    where: str = "row",
) -> EncodedText:
    """Render and tokenise messages.

    Args:
        messages: with a turn of the assistant's at each index of `turns`.
        tokenizer: a fast transformers tokenizer with a chat template.
        turns: indices of the messages whose tokens are marked, ascending.
        tools: JSON schemas of functions, for the template.
        options: further variables of the template.
        where: flag, file and row, for messages.
    Raises: ConfigError if the chat template fails, or a turn cannot be located.
    """
    check_options(tokenizer, options, where)
    chat = _Chat(tokenizer=tokenizer, tools=tools, options=options, where=where)
    marked = _marked_turns(messages, chat) if _MARKS.search(template_of(tokenizer, tools)) else None
    if marked is not None:
        token_ids, by_turn = marked
        is_completion = np.zeros(len(token_ids), dtype=bool)
        for index in turns:
            is_completion[by_turn[index]] = True
        return EncodedText(token_ids=token_ids, is_completion=is_completion)
    text, spans = _located(messages, turns, chat)
    token_ids, starts, _ = _tokens(text, tokenizer)
    is_completion = np.zeros(len(token_ids), dtype=bool)
    for begin, end in spans:
        turn = np.flatnonzero((starts >= begin) & (starts < end))
        is_completion[turn[: length_of_turn(token_ids[turn], tokenizer)]] = True
    return EncodedText(token_ids=token_ids, is_completion=is_completion)


def encode_text(prompt: str, completion: str, tokenizer: Any) -> EncodedText:
    """Tokenise plain text, with beginning-of-sequence if the tokenizer adds it, and end-of-sequence if it has it.

    A token with characters of both is the prompt's, unless the completion has no other.
    """
    text = prompt + completion
    token_ids, starts, ends = _tokens(text, tokenizer)
    is_completion = starts >= len(prompt)
    if not is_completion.any():
        is_completion = ends > len(prompt)
    before = leading_ids(text, tokenizer)
    eos = tokenizer.eos_token_id
    after = [] if eos is None or (len(token_ids) and token_ids[-1] == eos) else [eos]
    return EncodedText(
        token_ids=np.concatenate([before, token_ids, after]).astype(np.int32),
        is_completion=np.concatenate([np.zeros(len(before), bool), is_completion, np.ones(len(after), bool)]),
    )


def leading_ids(text: str, tokenizer: Any) -> list[int]:
    """Return the beginning-of-sequence token where the tokenizer adds one and the text does not begin with it."""
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer("")["input_ids"][:1] != [bos] or text.startswith(tokenizer.bos_token):
        return []
    return [bos]


def assistant_turns(messages: Messages, first: int = 0) -> list[int]:
    """Return the indices of the assistant's messages, from message `first` on."""
    return [index for index, message in enumerate(messages) if index >= first and message["role"] == "assistant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chat:
    """Apply a tokenizer's chat template to the messages of a row."""

    tokenizer: Any
    tools: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    where: str

    def apply(self, messages: Sequence[Message], **options: Any) -> Any:
        tools = list(self.tools) or None
        return apply_chat_template(self.tokenizer, messages, self.where, tools=tools, **self.options, **options)

    def rendered(self, messages: Sequence[Message], *, is_asking: bool) -> str:
        return str(self.apply(messages, add_generation_prompt=is_asking, tokenize=False))

    def beginning(self, messages: Messages, count: int, *, is_asking: bool) -> str:
        """Render the first messages by themselves; some templates refuse what they accept as a part."""
        chat = replace(self, where=f"{self.where}, messages 1 to {count} alone, by which a turn is located")
        try:
            return chat.rendered(messages[:count], is_asking=is_asking)
        except ConfigError as error:
            raise ConfigError(f"{error}; {_REMEDY}") from error


def _marked_turns(messages: Messages, chat: _Chat) -> tuple[np.ndarray, dict[int, np.ndarray]] | None:
    """Return the tokens, and those of each turn that the template marks; None if a turn has no mark of its own."""
    made = chat.apply(messages, return_dict=True, return_assistant_tokens_mask=True)
    mask = np.array(made["assistant_masks"], dtype=bool)
    marked = np.flatnonzero(mask)
    runs = np.split(marked, np.flatnonzero(np.diff(marked) > 1) + 1) if len(marked) else []
    turns = assistant_turns(messages)
    if len(runs) != len(turns):
        return None
    return np.array(made["input_ids"], dtype=np.int32), dict(zip(turns, runs, strict=True))


def _located(messages: Messages, turns: Sequence[int], chat: _Chat) -> tuple[str, list[tuple[int, int]]]:
    """Return the whole conversation's text, and the character ranges of turns."""
    text = chat.rendered(messages, is_asking=False)
    spans = []
    for index in turns:
        is_last = index + 1 == len(messages)
        after = text if is_last else chat.beginning(messages, index + 1, is_asking=False)
        before = chat.beginning(messages, index, is_asking=True) if index else _opening(after, chat)
        if not after.startswith(before):
            told = chat.beginning(messages, index, is_asking=False)
            raise ConfigError(_unlike_prompt(told, before, after, chat.where))
        if not text.startswith(after):
            raise ConfigError(
                f"{chat.where}: the model's chat template changes earlier messages when one is added ("
                f"{_parting(after, text)}), so that the turns of the assistant cannot be located; {_REMEDY}"
            )
        spans.append((len(before), len(after)))
    return text, spans


def _opening(first: str, chat: _Chat) -> str:
    """Return what a conversation begins with if its first message is the assistant's, which no prompt precedes.

    Its end is the text that asks for an answer: the template's generation prompt after any question.
    """
    question = [{"role": "user", "content": "question"}]
    told, asked = (chat.rendered(question, is_asking=is_asking) for is_asking in (False, True))
    header = asked[_num_common(told, asked) :]
    before, found, _ = first.partition(header) if header else ("", "", "")
    if not found:
        raise ConfigError(
            f"{chat.where}: the conversation begins with the assistant, and the model's chat template does not write "
            f"its generation prompt there, so that this turn cannot be located; {_REMEDY}"
        )
    return before + found


def _unlike_prompt(told: str, before: str, after: str, where: str) -> str:
    """Return why a turn does not go on where the generation prompt ends.

    Args:
        told: the messages before the turn.
        before: with the generation prompt.
        after: with the turn in its place.
        where: flag, file and row.
    """
    if not (before.startswith(told) and after.startswith(told)):
        return (
            f"{where}: the model's chat template changes earlier messages when one is added "
            f"({_parting(before, after)}), so that the turns of the assistant cannot be located; {_REMEDY}"
        )
    return (
        f"{where}: the model's chat template asks for an answer with {before[len(told) :]!r}, and writes the "
        f"assistant's turn as {_shortened(after[len(told) :])!r}, which does not begin with that; {_REMEDY}"
    )


def _parting(one: str, other: str) -> str:
    """Return the texts from where they part."""
    place = _num_common(one, other)
    return f"{_shortened(one[place:])!r} becomes {_shortened(other[place:])!r}"


def _num_common(one: str, other: str) -> int:
    """Count the characters that both texts begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


def _tokens(text: str, tokenizer: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return token ids int32[T], and the characters that each starts at and ends before, int[T]."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    return np.array(encoded["input_ids"], dtype=np.int32), offsets[:, 0], offsets[:, 1]
