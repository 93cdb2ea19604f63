"""Train one model's own copy of all weights, by the same requests as adapters.

Each has a `Backend` of its own, whose passes hold no other model's pieces.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.tinker.core import AdamStep
from consumer.backend import Backend
from consumer.objectives.tinker_losses import loss_terms, sequence_log_ratios
from consumer.tenants.pieces import Piece
from consumer.tenants.results import RankResults

# Every parameter decays alike, as torch's AdamW has it; the numbers are each step's own.
OPTIMIZER = OptimizerConfig(weight_decay_exempt="none")


class WholeModel:
    """Hold a model's weights, gradient and optimizer; methods are collective over the ranks."""

    def __init__(self, backend: Backend, num_steps: int = 0) -> None:
        """Take the backend of the model, which has taken so many steps."""
        self._backend = backend
        self.num_steps = num_steps

    def compute(self, pieces: Sequence[Piece], *, wants_gradient: bool, results: RankResults) -> None:
        """Compute this rank's pieces of one request."""
        batches = tuple(_micro_batch(piece) for piece in pieces)
        if not wants_gradient:
            scores = self._backend.score(batches)
            for piece, score in zip(pieces, scores, strict=True):
                loss = _terms(piece, score[0], _tensors(piece, score.device)).double().sum()
                results.add(piece, score[0], float(loss))
            return
        loss_fn = _Losses(pieces)
        batch = MiniBatch(
            step=self.num_steps, micro_batches=batches, is_last=False, loss_scale=0.0, learning_rate_progress=0.0
        )
        self._backend.forward_backward(batch, loss_fn)
        for piece, logprobs, total in loss_fn.found():
            results.add(piece, logprobs, total)

    def step(self, numbers: AdamStep) -> float:
        """Take an AdamW step and clear the gradient; see `AdapterSet.step`."""
        settings = OPTIMIZER.model_copy(
            update={
                "adam_betas": (numbers.beta1, numbers.beta2),
                "adam_eps": numbers.eps,
                "weight_decay": numbers.weight_decay,
                "max_grad_norm": numbers.grad_clip_norm or float("inf"),
            }
        )
        try:
            norm = self._backend.optimizer_step(loss_scale=1.0, learning_rate=numbers.learning_rate, settings=settings)
        except BaseException:
            self._backend.policy.forget_gradients()
            raise
        self.num_steps += 1
        return norm

    def save(self, directory: Path, *, with_optimizer: bool) -> None:
        """Write a Hugging Face model, and the optimizer's state."""
        state = {"step": self.num_steps, "policy_version": self.num_steps, "data": {}}
        self._backend.save(directory, state=state, has_optimizer=with_optimizer)

    def restore(self, directory: Path) -> None:
        """Go on with the optimizer of a checkpoint, whose weights the backend was built from."""
        self._backend.restore(directory)


class _Losses:
    """Serve as loss function of a request's pieces, and keep the log-probabilities that it sees, in their order."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._seen = list[Tensor]()  # float32[C] of consecutive targets
        self._losses = list[Tensor]()
        self.is_token_separable = all(piece.loss.is_token_separable for piece in pieces)

    def is_final(self, sums: Mapping[str, Tensor]) -> bool:
        """Return True: see `LossFn`."""
        return True

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch, or of a part of one; see `LossFn`."""
        mask = micro_batch["loss_mask"]
        own = logprobs[mask]
        if not self._pieces or not mask.any():  # of a rank that takes part in the others' pass
            return logprobs.sum() * 0.0, {}
        arrays = {name: micro_batch[name][mask] for name in self._pieces[0].arrays}
        piece = self._pieces[0] if self.is_token_separable else self._pieces[len(self._seen)]
        terms = _terms(piece, own, arrays)
        self._seen.append(own.detach().clone())
        self._losses.append(terms.detach().double().sum())
        return terms.sum(), {}

    def found(self) -> Iterator[tuple[Piece, Tensor, float]]:
        """Yield each piece's log-probabilities, and the request's loss with the first."""
        if not self._pieces:
            return
        sizes = [len(piece.targets) for piece in self._pieces]
        parts = torch.cat(self._seen).split(sizes)
        loss = float(torch.stack(self._losses).sum())
        for number, (piece, part) in enumerate(zip(self._pieces, parts, strict=True)):
            yield piece, part, loss if number == 0 else 0.0


def _terms(piece: Piece, logprobs: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
    if piece.loss.is_token_separable:
        return loss_terms(piece.loss, logprobs, arrays)
    ratios = sequence_log_ratios(logprobs, arrays, piece.num_targets)
    return loss_terms(piece.loss, logprobs, {**arrays, "sequence_log_ratio": ratios})


def _tensors(piece: Piece, device: torch.device) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in piece.arrays.items()}


def _micro_batch(piece: Piece) -> MicroBatch:
    """Lay a piece out as a row without padding; a position's K targets are K loss tokens of one source."""
    counts = [each // piece.width for each in piece.num_targets]
    size = len(piece.sources)
    starts = np.cumsum([0, *counts[:-1]])
    arrays: dict[str, Any] = {
        "token_ids": piece.targets[None],
        "sources": np.repeat(np.arange(size), piece.width)[None],
        "loss_mask": np.ones((1, len(piece.targets)), bool),
        "sample_index": np.repeat(np.arange(len(counts), dtype=np.int32), piece.num_targets)[None],
        "temperature": np.ones((1, len(piece.targets)), np.float32),
        **{name: array[None] for name, array in piece.arrays.items()},
    }
    return MicroBatch(
        token_ids=piece.token_ids[piece.sources][None],
        position_ids=np.concatenate([np.arange(count) for count in counts])[None],
        segments=np.array([[0, at, count, -1] for at, count in zip(starts, counts, strict=True)], np.int32),
        loss_arrays=arrays,
    )
