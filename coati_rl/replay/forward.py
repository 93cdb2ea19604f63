"""Score a micro-batch of one sample a row with plain transformers, from whole logits. R rows, M loss tokens per row."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati_rl.batch import MicroBatch
from coati_rl.ops.distilled_loss import Direction
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


def distilled_scores(
    model: ReplayModel, teacher: ReplayModel, micro_batch: MicroBatch, direction: Direction
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `token_scores` does, and the divergence of a teacher's distribution from the policy's at each token.

    Both distributions are of the whole vocabulary, at the tokens' temperatures; the teacher's carries no gradient.

    Args:
        model: the policy.
        teacher: with the same vocabulary.
        micro_batch: of one sample a row.
        direction: "reverse" is KL(policy || teacher), "forward" KL(teacher || policy).
    Returns: float32[R, M] each; divergences in nats.
    """
    found = []
    for row in range(len(micro_batch.token_ids)):
        mask = _mask(micro_batch, row)
        if not mask.any():
            found.append((torch.zeros(len(mask)),) * 3)
            continue
        own = _log_distributions(model, micro_batch, row)
        with torch.no_grad():
            its = _log_distributions(teacher, micro_batch, row)
        first, second = (own, its) if direction == "reverse" else (its, own)
        divergence = (first.exp() * (first - second)).sum(dim=-1)
        found.append((*_of_chosen(own, micro_batch, row), _spread(divergence, mask)))
    logprobs, entropies, divergences = zip(*found, strict=True)
    return torch.stack(logprobs), torch.stack(entropies), torch.stack(divergences)


def _row_scores(model: ReplayModel, micro_batch: MicroBatch, row: int) -> tuple[Tensor, Tensor]:
    mask = _mask(micro_batch, row)
    if not mask.any():
        nothing = torch.zeros(len(mask))
        return nothing, nothing
    if model.scalar_head is None:
        return _of_chosen(_log_distributions(model, micro_batch, row), micro_batch, row)
    module: Any = model.module
    hidden = module.base_model(input_ids=_row_ids(micro_batch, row), use_cache=False).last_hidden_state[0]
    values = model.scalar_head(hidden[_masked(micro_batch, "sources", row)]).squeeze(-1)
    return _spread(values, mask), _spread(torch.zeros_like(values), mask)


def _log_distributions(model: ReplayModel, micro_batch: MicroBatch, row: int) -> Tensor:
    """Return [N, V], log p of the whole vocabulary at the N tokens of a row that the loss counts, with gradient."""
    replayed = {}
    if model.routing is not None and micro_batch.routes is not None:
        replayed["routing"] = model.routing(micro_batch.routes[row : row + 1, : _row_length(micro_batch, row)])
    logits = model.module(input_ids=_row_ids(micro_batch, row), use_cache=False, **replayed).logits
    logits = logits[0, _masked(micro_batch, "sources", row)]
    if "temperature" in micro_batch.loss_arrays:
        logits = logits / _masked(micro_batch, "temperature", row)[:, None]
    return torch.log_softmax(logits, dim=-1)


def _of_chosen(distributions: Tensor, micro_batch: MicroBatch, row: int) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of a row's tokens and the entropies there, float32[M] each."""
    mask, chosen = _mask(micro_batch, row), _masked(micro_batch, "token_ids", row)
    entropy = -(distributions.exp() * distributions).sum(dim=-1)
    return _spread(distributions[torch.arange(len(chosen)), chosen], mask), _spread(entropy, mask)


def _mask(micro_batch: MicroBatch, row: int) -> Tensor:
    """Return the places of a row that the loss counts, bool[M]; none of an empty row."""
    mask = torch.tensor(micro_batch.loss_arrays["loss_mask"][row])
    return mask if _row_length(micro_batch, row) else torch.zeros_like(mask)


def _masked(micro_batch: MicroBatch, name: str, row: int) -> Tensor:
    return torch.tensor(micro_batch.loss_arrays[name][row])[_mask(micro_batch, row)]


def _row_ids(micro_batch: MicroBatch, row: int) -> Tensor:
    return torch.tensor(micro_batch.token_ids[row : row + 1, : _row_length(micro_batch, row)])


def _row_length(micro_batch: MicroBatch, row: int) -> int:
    return int(micro_batch.segments[micro_batch.segments[:, 0] == row, 2].sum())


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    spread = torch.zeros(len(mask), dtype=torch.float32)
    return spread.masked_scatter(mask, values.float())
