"""One mini-batch through the backend, and the optimizer step when it is the last of its step.

Consumes a rank's mini-batch; produces, with the last one, the step's metrics over all ranks.
"""

import dataclasses
import time
from typing import Any

from torch import Tensor

from coati_rl.algorithms.schedule import cosine_learning_rate
from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.protocols import LossFn, TrainBackend


class TrainStep:
    """Scores, accumulates, steps."""

    def __init__(self, backend: TrainBackend, loss_fn: LossFn, *, has_reference: bool, learning_rate: float) -> None:
        self._backend = backend
        self._loss_fn = loss_fn
        self._has_reference = has_reference
        self._learning_rate = learning_rate
        self._sums: dict[str, Tensor] = {}
        self._train_s = 0.0

    def run(self, batch: MiniBatch) -> dict[str, Any] | None:
        """Returns: the step's metrics by their names in metrics.jsonl, None until the step is complete.

        On ranks without the LM head there are only those that need no loss.
        """
        begin = time.perf_counter()
        scored = dataclasses.replace(batch, micro_batches=self._score(batch))
        self._sums = merge_sums(self._sums, self._backend.forward_backward(scored, self._loss_fn))
        if not batch.is_last:
            self._train_s += time.perf_counter() - begin
            return None
        learning_rate = cosine_learning_rate(batch.learning_rate_progress, peak=self._learning_rate)
        norm = self._backend.optimizer_step(loss_scale=batch.loss_scale, learning_rate=learning_rate)
        sums = self._backend.reduce_sums(self._sums)
        metrics = step_metrics(sums, loss_scale=batch.loss_scale) if sums else {}
        seconds = self._train_s + time.perf_counter() - begin
        self._sums, self._train_s = {}, 0.0
        return {**metrics, "grad_norm": norm, "learning_rate": learning_rate, "train_s": seconds}

    def _score(self, batch: MiniBatch) -> tuple[MicroBatch, ...]:
        """Add the log-probabilities that only the trainer can give."""
        micro_batches = batch.micro_batches
        for name, is_wanted, use_reference in (
            ("ref_logprobs", self._has_reference, True),
            ("old_logprobs", batch.recompute_old_logprobs, False),
        ):
            scores = self._backend.score(micro_batches, use_reference=use_reference) if is_wanted else []
            if scores:
                pairs = zip(micro_batches, scores, strict=True)
                micro_batches = tuple(dataclasses.replace(m, **{name: s.cpu().numpy()}) for m, s in pairs)
        return micro_batches


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
