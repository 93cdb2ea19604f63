"""Decode one batch of samples in plain transformers, with left-padded prompts, a KV cache and one token per step.

In: rows (samples) with their settings and generators. Out: the same rows, finished. B rows, L tokens so far. When the
weights change, the cache is recomputed from each row's prompt and tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati_rl.types import FinishReason, SamplingParams
from producer.engines.sampling import draw, penalised, processed_logprobs
from producer.engines.stop_strings import Decode, ends_with_stop
from producer.engines.token_stream import TokenStream
from producer.engines.transformers_routes import RouteRecorder

_COMPACT_BELOW = 0.75  # fraction of unfinished rows at which the finished ones are dropped, which copies the cache


@dataclass(kw_only=True, slots=True, eq=False)
class Row:
    """Hold the state of a sample that is being decoded."""

    request_id: str
    index: int  # of the sample in its request
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    generator: torch.Generator
    stream: TokenStream | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)  # of the weights that sampled each token
    finish_reason: FinishReason | None = None
    routes: list[np.ndarray] = field(default_factory=list)  # uint[tokens, D, K] of consecutive tokens, if recorded

    def add_routes(self, first: int, routes: np.ndarray) -> None:
        """Add those of a pass that began with token `first`; one that was computed before keeps its own."""
        num_known = sum(map(len, self.routes))
        self.routes.append(routes[num_known - first :])


class DecodingBatch:
    """Decode its rows to the end; `step` runs the model once."""

    def __init__(
        self,
        model: Any,
        rows: list[Row],
        *,
        eos_token_ids: frozenset[int],
        decode: Decode,
        recorder: RouteRecorder | None = None,
    ) -> None:
        """Start with an empty cache; `model` is a transformers causal language model in eval mode."""
        self._model = model
        self._rows = rows
        self._eos_token_ids = eos_token_ids
        self._decode = decode
        self._recorder = recorder
        self._cache: Any = None
        self._attention_mask = torch.empty(0)  # int64[B, L]; the first step makes it

    def step(self, policy_version: int) -> list[Row]:
        """Sample one token for every unfinished row with this policy_version. Returns: the rows that finished."""
        logits = self._prefill() if self._cache is None else self._decode_one()
        settings = [row.sampling for row in self._rows]
        logits = penalised(logits, settings, ((*row.prompt, *row.token_ids) for row in self._rows))
        logprobs = processed_logprobs(logits, settings)
        uniforms = [float(torch.rand((), generator=row.generator, dtype=torch.float64)) for row in self._rows]
        tokens = draw(logprobs, settings, uniforms)
        chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
        finished = []
        for row, token, logprob in zip(self._rows, tokens.tolist(), chosen.tolist(), strict=True):
            if row.finish_reason is None:
                row.token_ids.append(token)
                row.logprobs.append(logprob)
                row.policy_versions.append(policy_version)
                if row.stream is not None:
                    row.stream.send(row.index, [token], [logprob], policy_version)
                row.finish_reason = self._finish_reason(row)
                if row.finish_reason is not None:
                    finished.append(row)
        if self._num_unfinished() <= _COMPACT_BELOW * len(self._rows):
            self.drop_finished()
        return finished

    def is_done(self) -> bool:
        """Return True if every row is finished."""
        return not self._rows

    def clear_cache(self) -> None:
        """Clear the cache, so that the next step recomputes it; to be called after the weights have changed."""
        self._cache = None
        self.drop_finished()

    def drop_finished(self) -> None:
        """Remove finished and aborted rows from the batch."""
        alive = [index for index, row in enumerate(self._rows) if row.finish_reason is None]
        if self._cache is not None and 0 < len(alive) < len(self._rows):
            self._select(torch.tensor(alive, device=self._model.device), mask=self._attention_mask)
        self._rows = [self._rows[index] for index in alive]

    def _num_unfinished(self) -> int:
        return sum(row.finish_reason is None for row in self._rows)

    def _finish_reason(self, row: Row) -> FinishReason | None:
        if row.token_ids[-1] in self._eos_token_ids or ends_with_stop(row.token_ids, row.sampling.stop, self._decode):
            return "stop"
        return "length" if len(row.token_ids) >= row.max_tokens else None

    def _prefill(self) -> Tensor:
        """Run every distinct prefix once, then copy its cache to each row. Returns: float32[B, V] logits."""
        prefixes = [(*row.prompt, *row.token_ids) for row in self._rows]
        prompts = list(dict.fromkeys(prefixes))
        width = max(len(prompt) for prompt in prompts)
        device = self._model.device
        token_ids = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        output = self._run(token_ids, mask, positions=(mask.cumsum(dim=-1) - 1).clamp(min=0))
        index_of = {prompt: index for index, prompt in enumerate(prompts)}
        indices = torch.tensor([index_of[prefix] for prefix in prefixes], device=device)
        if self._recorder is not None:
            routes = self._recorder.take(token_ids)
            for row, prefix in zip(self._rows, prefixes, strict=True):
                row.add_routes(0, routes[index_of[prefix], width - len(prefix) :])
        self._select(indices, mask=mask)
        return output[indices]

    def _decode_one(self) -> Tensor:
        device = self._model.device
        token_ids = torch.tensor([[row.token_ids[-1]] for row in self._rows], device=device)
        self._attention_mask = torch.nn.functional.pad(self._attention_mask, (0, 1), value=1)
        # Those of finished rows stay, since a model's table of positions may end there.
        positions = torch.tensor([[len(row.prompt) + len(row.token_ids) - 1] for row in self._rows], device=device)
        logits = self._run(token_ids, self._attention_mask, positions=positions)
        if self._recorder is not None:
            for row, routes in zip(self._rows, self._recorder.take(token_ids), strict=True):
                if row.finish_reason is None:
                    row.add_routes(len(row.prompt) + len(row.token_ids) - 1, routes)
        return logits

    def _run(self, token_ids: Tensor, mask: Tensor, *, positions: Tensor) -> Tensor:
        with torch.inference_mode():
            output = self._model(
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self._cache = output.past_key_values
        logits: Tensor = output.logits[:, -1]
        return logits.float()

    def _select(self, indices: Tensor, *, mask: Tensor) -> None:
        with torch.inference_mode():
            self._cache.batch_select_indices(indices)
        self._attention_mask = mask[indices]
