"""Compute rewards of conversations with a sequence classification model of one label.

A conversation is rendered by the reward model's own chat template and tokenised by its own tokenizer; its reward is the
score at its last token that is not the model's padding token, which is where transformers reads it. B sequences of a
batch, padded to T tokens on the left.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rewards.model.judgement import JudgedConversation, Judgement

logger = logging.getLogger(__name__)

MAX_BATCH_TOKENS = 16384  # of a forward pass, padding included; a longer sequence is a batch of its own


class RewardModel:
    """Hold a reward model and its tokenizer on one device.

    Args:
        directory: checked by `check_reward_model`.
        device: "cpu" or "cuda".
        dtype: of weights and activations; the scores are float32.
    Raises: OSError, ValueError if it cannot be loaded.
    """

    def __init__(self, directory: Path, *, device: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
        self._model = model.to(device).eval()
        self._device = device
        self._padding: int | None = self._model.config.pad_token_id
        text_config = self._model.config.get_text_config()
        self._max_tokens = int(getattr(text_config, "max_position_embeddings", 0) or 0) or math.inf

    def score(self, conversations: Sequence[JudgedConversation]) -> list[Judgement]:
        """Return a judgement of each conversation, in order; one that cannot be scored has its problem."""
        judgements: dict[int, Judgement] = {}
        sequences: dict[int, list[int]] = {}
        for index, conversation in enumerate(conversations):
            try:
                sequences[index] = self._tokens(conversation)
            except Exception as error:  # noqa: BLE001 - whatever a chat template raises at this conversation
                judgements[index] = Judgement(problem=f"the chat template refuses it: {type(error).__name__}: {error}")
        for index in [index for index, tokens in sequences.items() if not 0 < len(tokens) <= self._max_tokens]:
            num_tokens = len(sequences.pop(index))
            limit = f"{num_tokens} tokens, more than the model's {self._max_tokens:g} positions"
            judgements[index] = Judgement(problem=limit if num_tokens else "no tokens")
        for indices in _batches({index: len(tokens) for index, tokens in sequences.items()}):
            rewards = self._forward([sequences[index] for index in indices])
            judgements |= {index: _judgement(reward) for index, reward in zip(indices, rewards, strict=True)}
        return [judgements[index] for index in range(len(conversations))]

    def _tokens(self, conversation: JudgedConversation) -> list[int]:
        if not conversation.messages:
            tokens: list[int] = self._tokenizer(conversation.prompt + conversation.response)["input_ids"]
            return tokens
        messages = [*conversation.messages, {"role": "assistant", "content": conversation.response}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        rendered: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes them
        return rendered

    @torch.inference_mode()
    def _forward(self, sequences: Sequence[list[int]]) -> list[float]:
        """Return the score of each sequence, from one forward pass."""
        length = max(map(len, sequences))
        padding = self._padding
        if padding is None:  # the last token is read, whatever it is; the model takes no batch without a padding token
            last_tokens = {tokens[-1] for tokens in sequences}
            padding = next(token for token in range(len(last_tokens) + 1) if token not in last_tokens)
            self._model.config.pad_token_id = padding
        input_ids = torch.full((len(sequences), length), padding)  # int64[B, T]
        mask = torch.zeros((len(sequences), length), dtype=torch.int64)
        for row, tokens in enumerate(sequences):
            input_ids[row, length - len(tokens) :] = torch.tensor(tokens)
            mask[row, length - len(tokens) :] = 1
        position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = self._model(
            input_ids=input_ids.to(self._device),
            attention_mask=mask.to(self._device),
            position_ids=position_ids.to(self._device),
            use_cache=False,
        ).logits  # [B, 1]
        rewards: list[float] = logits.float()[:, 0].tolist()
        return rewards


def _batches(lengths: dict[int, int]) -> Iterator[list[int]]:
    """Yield batches of indices, by length, each of at most MAX_BATCH_TOKENS with its padding."""
    batch: list[int] = []
    for index in sorted(lengths, key=lambda index: lengths[index]):
        if batch and (len(batch) + 1) * lengths[index] > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _judgement(reward: float) -> Judgement:
    return Judgement(reward=reward) if math.isfinite(reward) else Judgement(problem=f"it gave {reward}")
