"""One mini-batch through the backend, and the optimizer step when it is the last of its step.

Consumes a rank's mini-batch; produces, with the last one, the step's metrics over all ranks.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from coati_rl.algorithms.schedule import cosine_learning_rate
from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.protocols import LossFn, TrainBackend

Reduce = Callable[[dict[str, Tensor]], dict[str, float]]  # sums of this rank -> over all ranks


class TrainStep:
    """Scores, accumulates, steps."""

    def __init__(
        self, backend: TrainBackend, loss_fn: LossFn, *, has_reference: bool, learning_rate: float, reduce: Reduce
    ) -> None:
        self._backend = backend
        self._loss_fn = loss_fn
        self._has_reference = has_reference
        self._learning_rate = learning_rate
        self._reduce = reduce
        self._sums: dict[str, Tensor] = {}
        self._train_s = 0.0

    def run(self, batch: MiniBatch) -> dict[str, Any] | None:
        """Returns: the step's metrics by their names in metrics.jsonl, None until the step is complete."""
        begin = time.perf_counter()
        scored = tuple(self._score(micro_batch, batch) for micro_batch in batch.micro_batches)
        sums = self._backend.forward_backward(dataclasses.replace(batch, micro_batches=scored), self._loss_fn)
        self._sums = merge_sums(self._sums, sums)
        if not batch.is_last:
            self._train_s += time.perf_counter() - begin
            return None
        learning_rate = cosine_learning_rate(batch.learning_rate_progress, peak=self._learning_rate)
        norm = self._backend.optimizer_step(loss_scale=batch.loss_scale, learning_rate=learning_rate)
        metrics = step_metrics(self._reduce(self._sums), loss_scale=batch.loss_scale)
        seconds = self._train_s + time.perf_counter() - begin
        self._sums, self._train_s = {}, 0.0
        return {**metrics, "grad_norm": norm, "learning_rate": learning_rate, "train_s": seconds}

    def _score(self, micro_batch: MicroBatch, batch: MiniBatch) -> MicroBatch:
        """Add the log-probabilities that only the trainer can give."""
        scores = {}
        if self._has_reference:
            scores["ref_logprobs"] = self._backend.score(micro_batch, use_reference=True).cpu().numpy()
        if batch.recompute_old_logprobs:
            scores["old_logprobs"] = self._backend.score(micro_batch, use_reference=False).cpu().numpy()
        return dataclasses.replace(micro_batch, **scores) if scores else micro_batch


def step_metrics(sums: dict[str, float], *, loss_scale: float) -> dict[str, float | None]:
    """Means over the tokens of the step, from sums over all ranks."""
    tokens, gap_tokens = sums["num_tokens"], sums["gap_tokens"]
    return {
        "loss": sums["loss_sum"] * loss_scale,
        "kl_mean": sums["kl_sum"] / tokens if "kl_sum" in sums else None,
        "entropy_mean": sums["entropy_sum"] / tokens,
        "clip_fraction": sums["clip_sum"] / tokens,
        "ratio_max": sums["ratio_max"],
        "logprob_gap_mean": sums["gap_sum"] / gap_tokens if gap_tokens else None,
        "logprob_gap_max": sums["gap_max"] if gap_tokens else None,
    }
