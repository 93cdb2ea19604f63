"""Score a micro-batch of one sample a row with plain transformers, from whole logits. R rows, M loss tokens per row."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati_rl.batch import MicroBatch
from coati_rl.replay.parts import ReplayModel


def tensors_of(micro_batch: MicroBatch, *, step: int) -> dict[str, Tensor]:
    """Return the loss arrays as tensors, and `trainer_version`. `step`: optimizer steps taken."""
    arrays = {name: torch.tensor(np.ascontiguousarray(array)) for name, array in micro_batch.loss_arrays.items()}
    return {**arrays, "trainer_version": torch.tensor(step)}


def token_scores(model: ReplayModel, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (of a scalar head: values) and entropies of the loss tokens, with gradient.

    Returns: float32[R, M] each, in nats, at the tokens' temperatures; 0 where the loss mask is False.
    """
    rows = [_row_scores(model, micro_batch, row) for row in range(len(micro_batch.token_ids))]
    first, second = zip(*rows, strict=True)
    return torch.stack(first), torch.stack(second)


def _row_scores(model: ReplayModel, micro_batch: MicroBatch, row: int) -> tuple[Tensor, Tensor]:
    arrays = micro_batch.loss_arrays
    mask = torch.tensor(arrays["loss_mask"][row])
    length = int(micro_batch.segments[micro_batch.segments[:, 0] == row, 2].sum())
    if not length or not mask.any():
        nothing = torch.zeros(len(mask))
        return nothing, nothing
    sources = torch.tensor(arrays["sources"][row])[mask]
    chosen = torch.tensor(arrays["token_ids"][row])[mask]
    ids = torch.tensor(micro_batch.token_ids[row : row + 1, :length])
    if model.scalar_head is not None:
        module: Any = model.module
        hidden = module.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        values = model.scalar_head(hidden[sources]).squeeze(-1)
        return _spread(values, mask), _spread(torch.zeros_like(values), mask)
    logits = model.module(input_ids=ids, use_cache=False).logits[0, sources]
    temperature = torch.tensor(arrays["temperature"][row])[mask] if "temperature" in arrays else torch.ones(len(chosen))
    logprobs = torch.log_softmax(logits / temperature[:, None], dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return _spread(logprobs[torch.arange(len(chosen)), chosen], mask), _spread(entropy, mask)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    spread = torch.zeros(len(mask), dtype=torch.float32)
    return spread.masked_scatter(mask, values.float())
