"""Decode rows in blocks of a fixed number of places, so that a row's bits do not depend on what is beside it.

A product with a fixed number of rows rounds each of them alike, wherever it stands and whatever the others hold; and
keys that are masked add exact zeros. So a prompt is computed alone, and its tokens in a block of `PLACES` rows, of one
policy, whose free places hold zeros. V vocabulary, P tokens of a prompt, K keys of a block's longest row, rounded up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati_rl.tinker.core import SampledSequence, SampleRequest
from coati_rl.types import SamplingParams
from producer.engines.sampling import draw, processed_logprobs
from producer.engines.stop_strings import ends_with_stop

PLACES = 16
_KEY_STEP = 64  # by which a block's cache grows

Layers = list[tuple[Tensor, Tensor]]  # keys and values, [1, H, P, D], of each layer


@dataclass(kw_only=True, slots=True, eq=False)
class Row:
    """Hold a sample that is being decoded."""

    request: SampleRequest
    end_ids: frozenset[int]
    max_tokens: int
    draws: np.random.Generator
    done: Callable[[BaseException | None], None]  # called when it ends, or fails
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    has_stopped: bool = False
    is_cancelled: bool = False

    @property
    def params(self) -> SamplingParams:
        """Return how its tokens are drawn."""
        asked = self.request
        top_k = asked.top_k if asked.top_k > 0 else None
        return SamplingParams(temperature=asked.temperature, top_p=asked.top_p, top_k=top_k)

    def take(self, token: int, logprob: float, decode: Callable[[Sequence[int]], str]) -> bool:
        """Add a token. Returns: True if it is the last one."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        stops = self.request.stop_texts
        self.has_stopped = token in self.end_ids or (bool(stops) and ends_with_stop(self.token_ids, stops, decode))
        return self.has_stopped or len(self.token_ids) >= self.max_tokens

    @property
    def sequence(self) -> SampledSequence:
        """Return what it came to."""
        return SampledSequence(token_ids=self.token_ids, logprobs=self.logprobs, has_stopped=self.has_stopped)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """Hold what a prompt's forward pass leaves."""

    layers: Layers
    logits: Tensor  # float32[1, V], of the first token after it
    all_logits: Tensor | None  # float32[P, V], where they were asked for


def prefill(model: Any, prompt: Sequence[int], *, keeps_logits: bool) -> Prefill:
    """Run a model on one prompt."""
    from transformers import DynamicCache

    cache = DynamicCache()
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=0 if keeps_logits else 1)
    logits = output.logits[0].float()
    return Prefill(
        layers=[(layer.keys, layer.values) for layer in cache.layers],
        logits=logits[-1:],
        all_logits=logits if keeps_logits else None,
    )


class _RowCache:
    """Keep the keys and values of a block, each row's from place 0 on: a cache as transformers' models call it."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.lengths: Tensor  # int64[PLACES], tokens of each row before this step

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        rows = torch.arange(PLACES, device=keys.device)
        for cached, new in zip(self.layers[layer], (keys, values), strict=True):
            cached[rows, :, self.lengths] = new[:, :, 0]
        return self.layers[layer]

    def get_seq_length(self, *_: Any) -> int:
        return int(self.layers[0][0].shape[2])


class Block:
    """Decode up to `PLACES` rows of one policy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rows: list[Row | None] = [None] * PLACES
        self._lengths = [0] * PLACES  # tokens whose keys are in the cache
        self._cache = _RowCache()

    @property
    def num_free(self) -> int:
        """Return the number of free places."""
        return self.rows.count(None)

    def put(self, row: Row, layers: Layers) -> None:
        """Give a row, whose first token is drawn, a place."""
        place = self.rows.index(None)
        length = layers[0][0].shape[2]
        self._grow(layers, length + 1)
        for cached, new in zip(self._cache.layers, layers, strict=True):
            for own, prompts in zip(cached, new, strict=True):
                own[place, :, :length] = prompts[0]
        self.rows[place], self._lengths[place] = row, length

    def _grow(self, like: Layers, length: int) -> None:
        wanted = -(-length // _KEY_STEP) * _KEY_STEP
        if not self._cache.layers:
            self._cache.layers = [_empty(keys, values, wanted) for keys, values in like]
        now = self._cache.get_seq_length()
        if wanted > now:
            self._cache.layers = [
                (_padded(keys, wanted - now), _padded(values, wanted - now)) for keys, values in self._cache.layers
            ]

    def step(self, model: Any, decode: Callable[[Sequence[int]], str]) -> None:
        """Draw one token for each row; rows that end, or were cancelled, leave."""
        for place, row in enumerate(self.rows):
            if row is not None and row.is_cancelled:
                self._free(place)
        if self.num_free == PLACES:
            return
        self._grow(self._cache.layers, max(self._lengths) + 1)
        lengths = torch.tensor(self._lengths, device=self._device)
        self._cache.lengths = lengths
        last = [row.token_ids[-1] if row is not None else 0 for row in self.rows]
        keys = torch.arange(self._cache.get_seq_length(), device=self._device)
        output = model(
            input_ids=torch.tensor(last, device=self._device)[:, None],
            attention_mask=(keys <= lengths[:, None])[:, None, None],
            position_ids=lengths[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        tokens, logprobs = drawn(output.logits[:, -1].float(), self.rows)
        for place, row in enumerate(self.rows):
            if row is not None:
                self._lengths[place] += 1
                if row.take(tokens[place], logprobs[place], decode):
                    self._free(place)
                    row.done(None)

    def _free(self, place: int) -> None:
        self.rows[place], self._lengths[place] = None, 0


def drawn(logits: Tensor, rows: Sequence[Row | None]) -> tuple[list[int], list[float]]:
    """Draw a token of each row. Returns: tokens, and their log-probabilities at temperature 1, without top-k and top-p.

    Args:
        logits: float32[rows, V].
        rows: None of a free place, which gets the likeliest token.
    """
    greedy = SamplingParams(temperature=0.0)
    settings = [row.params if row is not None else greedy for row in rows]
    uniforms = [row.draws.random() if row is not None else 0.0 for row in rows]
    raw = logits.log_softmax(dim=-1)
    tokens = draw(processed_logprobs(logits, settings), settings, uniforms)
    return tokens.tolist(), raw.gather(-1, tokens[:, None])[:, 0].tolist()


def _empty(keys: Tensor, values: Tensor, length: int) -> tuple[Tensor, Tensor]:
    def zeros(like: Tensor) -> Tensor:
        return like.new_zeros(PLACES, like.shape[1], length, like.shape[3])

    return zeros(keys), zeros(values)


def _padded(cached: Tensor, more: int) -> Tensor:
    return torch.nn.functional.pad(cached, (0, 0, 0, more))
