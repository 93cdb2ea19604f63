"""Turn conversations into samples for supervised training: the assistant's turns are in the loss, all else is context.

A row is rendered whole by the model's chat template and tokenised once. Which of its characters are the assistant's is
found by difference: what the template adds to the conversation before a turn, up to the token that ends the turn. T
tokens of a conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coati_rl.errors import ConfigError
from coati_rl.samples import Sample

_NO_PREFIX = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationSet:
    """The usable conversations of a file, and how many were refused for their length."""

    samples: tuple[Sample, ...]
    num_refused: int


def make_conversations(
    conversations: Sequence[Sequence[dict[str, Any]]], tokenizer: Any, *, max_tokens: int, flag: str = "--dataset"
) -> ConversationSet:
    """Render, tokenise and mask conversations; uids are `row-<number>`.

    Args:
        conversations: messages {"role", "content"} each, at least one of the assistant's.
        tokenizer: a fast transformers tokenizer with a chat template.
        max_tokens: longer conversations are left out and counted.
        flag: the command-line flag that they came from, for messages.
    Raises: ConfigError if a row has no turn of the assistant's, or the template changes what came before when a turn is
        added, so that turns cannot be told apart.
    """
    samples = []
    for number, messages in enumerate(conversations):
        text, spans = _render(messages, tokenizer, f"{flag}, row {number + 1}")
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        token_ids = np.array(encoded["input_ids"], dtype=np.int32)
        if len(token_ids) > max_tokens:
            continue
        loss_mask = np.zeros(len(token_ids), dtype=bool)
        starts = np.array([start for start, _ in encoded["offset_mapping"]])
        for begin, end in spans:
            turn = np.flatnonzero((starts >= begin) & (starts < end))
            loss_mask[turn[: _length_of_turn(token_ids[turn], tokenizer)]] = True
        loss_mask[:1] = False  # nothing predicts the first token
        samples.append(
            Sample(
                uid=f"row-{number}",
                number=0,
                prefix_ids=_NO_PREFIX,
                token_ids=token_ids,
                loss_mask=loss_mask,
                arrays={"loss_weights": 1.0, "temperature": 1.0},
            )
        )
    return ConversationSet(samples=tuple(samples), num_refused=len(conversations) - len(samples))


def _render(messages: Sequence[dict[str, Any]], tokenizer: Any, where: str) -> tuple[str, list[tuple[int, int]]]:
    """The whole conversation's text, and the characters of each of the assistant's turns."""

    def rendered(count: int, *, is_asking: bool) -> str:
        return str(
            tokenizer.apply_chat_template(list(messages[:count]), add_generation_prompt=is_asking, tokenize=False)
        )

    text = rendered(len(messages), is_asking=False)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ConfigError(f"{where}: no message has the role assistant: there is nothing to learn from it")
    spans = []
    for index in turns:
        before, after = rendered(index, is_asking=True), rendered(index + 1, is_asking=False)
        if not after.startswith(before) or not text.startswith(after):
            raise ConfigError(
                f"{where}: the model's chat template changes earlier messages when one is added, so that the turns of "
                "the assistant cannot be told from the rest; use a template that only adds text"
            )
        spans.append((len(before), len(after)))
    return text, spans


def _length_of_turn(token_ids: np.ndarray, tokenizer: Any) -> int:
    """Tokens of a turn up to the last special one, which ends it; what the template writes after it is not sampled."""
    special = np.flatnonzero(np.isin(token_ids, tokenizer.all_special_ids))
    return int(special[-1]) + 1 if len(special) else len(token_ids)
