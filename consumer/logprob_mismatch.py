"""Measure the engine-trainer gap on tokens that earlier weights sampled, with these weights.

The loss measures it on tokens of the trainer's own version. With --n-behind, or several optimizer steps per weight
sync, a step may hold none: the trainer has gone on since the engine got its weights.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch
from coati_rl.config import Config
from coati_rl.observability.timeline import NO_TIMELINE, Timeline
from coati_rl.protocols import TrainBackend
from consumer.models.weight_history import WeightHistory


class MismatchMeter:
    """Of one trainer rank."""

    def __init__(
        self,
        backend: TrainBackend,
        history: WeightHistory,
        timeline: Timeline = NO_TIMELINE,
        *,
        num_tokens: int,
        sync_period: int,
    ) -> None:
        """Take over an empty history.

        Args:
            backend: what scores.
            history: of the weights that it scores with; it holds the same versions on all ranks that hold one copy.
            timeline: where scoring shows.
            num_tokens: of a step, at least, if there are so many; whole micro-batches are measured.
            sync_period: optimizer steps between weight syncs.
        """
        self._backend = backend
        self._history = history
        self._timeline = timeline
        self._num_tokens = num_tokens
        self._sync_period = sync_period
        self._num_left = num_tokens  # to be measured in the present step
        self._is_first_step = True

    def measure(self, micro_batches: Sequence[MicroBatch], *, step: int) -> dict[str, Tensor]:
        """Score tokens of kept versions until there are enough in the step; the live weights are as before afterwards.

        Returns: `gap_tokens`, `gap_sum` and `gap_max` like those of `PolicyLoss`, over the tokens that were measured;
            empty where nothing was, and on ranks without the LM head.
        """
        versions, chosen = self._history.versions - {step}, list[MicroBatch]()
        for micro_batch in micro_batches:
            num_found = int(_sampled_by(micro_batch, *versions).sum())
            if num_found and self._num_left > 0:
                chosen.append(micro_batch)
                self._num_left -= num_found
        sums: dict[str, Tensor] = {}
        for version in sorted(versions):
            scored = [m for m in chosen if _sampled_by(m, version).any()]
            if not self._backend.any_rank(bool(scored)):
                continue
            with self._timeline.span("score version", version=version), self._history.in_place(version):
                scores = self._backend.score(scored)
            for micro_batch, score in zip(scored, scores, strict=False):
                sums = merge_sums(sums, _gap_sums(micro_batch, score.cpu().numpy(), version))
        return sums

    def end_step(self, step: int) -> None:
        """Before optimizer step `step`: keep the weights, if engines sample with them. They hold those of a sync, and
        after a resume the checkpoint's.
        """
        if self._is_first_step or step % self._sync_period == 0:
            self._history.keep(step)
        self._is_first_step = False
        self._num_left = self._num_tokens


def sampling_gap(backend: TrainBackend, config: Config, timeline: Timeline = NO_TIMELINE) -> MismatchMeter:
    """A run's, of this rank. The first copy of the weights measures for all: each would need memory of its own."""
    num_versions = config.num_kept_versions if backend.layout.is_first_copy else 0
    history = WeightHistory(backend.live_weights(), max_versions=num_versions)
    return MismatchMeter(
        backend, history, timeline, num_tokens=config.sync.logprob_gap_tokens, sync_period=config.sync_period
    )


def _sampled_by(micro_batch: MicroBatch, *versions: int) -> np.ndarray:
    """bool[R, M]: loss tokens that one of these versions sampled."""
    arrays = micro_batch.loss_arrays
    sampled: np.ndarray = np.isin(arrays["policy_version"], versions) & arrays["loss_mask"]
    return sampled


def _gap_sums(micro_batch: MicroBatch, logprobs: np.ndarray, version: int) -> dict[str, Tensor]:
    sampled = _sampled_by(micro_batch, version)
    gap = np.abs(logprobs.astype(np.float64) - micro_batch.loss_arrays["rollout_logprobs"])[sampled]  # float64[N], nats
    sums = {"gap_tokens": float(gap.size), "gap_sum": float(gap.sum()), "gap_max": float(gap.max())}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
