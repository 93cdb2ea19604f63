"""Measure the engine-trainer log-probability mismatch that the loss does not see, and what bfloat16 explains of it.

The loss measures the mismatch on tokens of the trainer's current policy_version. With --n-behind, or several optimizer
steps per weight sync, a batch may hold none of those; the tokens are then scored with kept copies of the weights that
sampled them. In bfloat16 some tokens are scored in float32, too, in the first step and then from time to time: see
`RoundingSums`.
"""

import dataclasses
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from coati_rl.algorithms.rounding import RoundingSums
from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch
from coati_rl.config import Config
from coati_rl.observability.timeline import NO_TIMELINE, Timeline
from consumer.models.weight_history import WeightHistory

if TYPE_CHECKING:
    from consumer.backend import Backend

_ROUNDING_SHARE = 1 / 32  # of the tokens that are trained: the most that are scored in float32, after the first


class MismatchMeter:
    """Measure the mismatch on one trainer rank."""

    def __init__(
        self,
        backend: "Backend",
        history: WeightHistory,
        timeline: Timeline = NO_TIMELINE,
        *,
        num_tokens: int,
        sync_period: int,
        num_rounding_tokens: int | None = None,
    ) -> None:
        """Start with an empty history.

        Args:
            backend: computes the log-probabilities.
            history: weights of earlier versions; the same versions on all ranks that run a forward together.
            timeline: records the spans of scoring.
            num_tokens: tokens to measure per step, if there are as many.
            sync_period: optimizer steps between weight syncs.
            num_rounding_tokens: of the trainer's own version, to score in float32 in a step in which rounding is
                measured, like those of kept versions; 0: another rank does it; None: rounding is not reported.
        """
        self._backend = backend
        self._history = history
        self._timeline = timeline
        self._num_tokens = num_tokens
        self._sync_period = sync_period
        self._num_rounding_tokens = num_rounding_tokens
        self._num_trained = 0  # tokens in rows
        self._num_in_float32 = 0  # of those, scored in float32 as well
        self._num_known = 0  # sampled tokens among them
        self._is_first_step = True
        self._num_left, self._num_own_left = 0, 0  # to be measured in this step, of kept versions and of the live one
        self._measures_rounding = False  # in this step
        self._begin_step()

    def measure(self, micro_batches: Sequence[MicroBatch], *, step: int) -> dict[str, Tensor]:
        """Score tokens of the step, with the weights that sampled them; the live weights are restored afterwards.

        Returns: `gap_tokens`, `gap_sum` and `gap_max` as `PolicyLoss` reports them, over the tokens of kept versions up
            to the step's number, none if there are none; where rounding is reported `rounding_tokens`, `rounding_sum`,
            `rounding_squares` and `rounding_shift` of those and of the live version's. Nothing without the LM head.
        """
        kept = self._history.versions - {step}
        chosen, self._num_left = _choose(micro_batches, kept, self._num_left)
        own, self._num_own_left = _choose(micro_batches, {step}, self._num_own_left)
        self._num_trained += sum(micro_batch.num_tokens for micro_batch in micro_batches)
        sums: dict[str, Tensor] = {}
        if self._num_rounding_tokens is not None:
            sums = _rounding_sums(RoundingSums())  # every rank reports the same names
        for version in sorted(kept):
            sums = merge_sums(sums, self._score(chosen, version, is_live=False))
        if self._measures_rounding:
            sums = merge_sums(sums, self._score(own, step, is_live=True))
        return sums

    def end_step(self, step: int) -> None:
        """Keep the weights if engines sample with them; call it before optimizer step `step` (counted from 0).

        Engines sample with the weights of a sync and, after a resume, with those of the checkpoint.
        """
        if self._is_first_step or step % self._sync_period == 0:
            self._history.keep(step)
        self._is_first_step = False
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_left = self._num_tokens
        wanted = self._num_rounding_tokens or 0
        is_rare = self._num_in_float32 <= _ROUNDING_SHARE * self._num_trained
        self._num_own_left = wanted if is_rare or self._num_known < wanted else 0
        self._measures_rounding = self._num_own_left > 0

    def _score(self, chosen: Sequence[MicroBatch], version: int, *, is_live: bool) -> dict[str, Tensor]:
        """Return the sums over what a version sampled; the loss has the gap of the live one."""
        scored = [m for m in chosen if _sampled_by(m, version).any()]
        if not self._backend.any_rank(bool(scored)):
            return {}
        weights = nullcontext() if is_live else self._history.swapped_in(version)
        references: list[Tensor] = []
        with self._timeline.span("score version", version=version), weights:
            scores = self._backend.score(scored)
            if self._measures_rounding:
                references = self._backend.score_float32(scored)
                self._num_in_float32 += sum(micro_batch.num_tokens for micro_batch in scored)
                self._num_known += sum(int(_sampled_by(micro_batch, version).sum()) for micro_batch in scored)
        sums: dict[str, Tensor] = {}
        for micro_batch, score in zip(scored, scores, strict=False):
            if not is_live:
                sums = merge_sums(sums, _gap_sums(micro_batch, score.cpu().numpy(), version))
        for micro_batch, score, reference in zip(scored, scores, references, strict=False):
            sampled = _sampled_by(micro_batch, version)
            arrays = (micro_batch.loss_arrays["rollout_logprobs"], score.cpu().numpy(), reference.cpu().numpy())
            sums = merge_sums(sums, _rounding_sums(RoundingSums.of(*(array[sampled] for array in arrays))))
        return sums


def make_mismatch_meter(backend: "Backend", config: Config, timeline: Timeline = NO_TIMELINE) -> MismatchMeter:
    """Make this rank's meter; only the first data-parallel rank keeps weights and measures, to save host memory."""
    is_first = backend.layout.has_first_samples
    history = WeightHistory(backend.live_weights(), max_versions=config.num_kept_versions if is_first else 0)
    num_tokens = config.sync.logprob_gap_tokens
    is_judged = backend.precision == "bf16" and config.sync.judges_rounding and not config.recomputes_old_logprobs
    return MismatchMeter(
        backend,
        history,
        timeline,
        num_tokens=num_tokens,
        sync_period=config.sync_period,
        num_rounding_tokens=None if not is_judged else num_tokens if is_first else 0,
    )


def _sampled_by(micro_batch: MicroBatch, *versions: int) -> np.ndarray:
    """Return bool[R, M]: True on loss tokens that one of these versions sampled."""
    arrays = micro_batch.loss_arrays
    sampled: np.ndarray = np.isin(arrays["policy_version"], versions) & arrays["loss_mask"]
    return sampled


def _choose(
    micro_batches: Sequence[MicroBatch], versions: Collection[int], num_tokens: int
) -> tuple[list[MicroBatch], int]:
    """Return the parts with the first `num_tokens` tokens of some versions, and how many tokens are still missing."""
    chosen = list[MicroBatch]()
    for micro_batch in micro_batches:
        sampled = _sampled_by(micro_batch, *versions)
        if num_tokens > 0 and sampled.any():
            chosen.append(_cut(micro_batch, sampled, num_tokens))
            num_tokens -= int(sampled.sum())
    return chosen, num_tokens


def _cut(micro_batch: MicroBatch, sampled: np.ndarray, num_tokens: int) -> MicroBatch:
    """Return the first rows with `num_tokens` sampled tokens, of a single row only these; all if there are fewer.

    Tokens of a row depend on earlier ones alone, so that what is left is scored as in the whole.

    Args:
        micro_batch: R rows.
        sampled: bool[R, M], which loss tokens are counted.
        num_tokens: at least 1.
    """
    num_rows = int(np.searchsorted(np.cumsum(sampled.sum(axis=1)), num_tokens)) + 1
    arrays = {name: array[:num_rows] for name, array in micro_batch.loss_arrays.items()}
    length = micro_batch.token_ids.shape[1]
    if num_rows == 1:
        num_loss_tokens = int(np.searchsorted(np.cumsum(sampled[0]), num_tokens)) + 1
        arrays = {name: array[:, :num_loss_tokens] for name, array in arrays.items()}
        length = int(arrays["sources"].max()) + 1  # the last place that predicts one of them
    segments = micro_batch.segments
    kept = segments[(segments[:, 0] < num_rows) & (segments[:, 1] < length)].copy()
    kept[:, 2] = np.minimum(kept[:, 2], length - kept[:, 1])
    return dataclasses.replace(
        micro_batch,
        token_ids=micro_batch.token_ids[:num_rows, :length],
        position_ids=micro_batch.position_ids[:num_rows, :length],
        segments=kept,
        loss_arrays=arrays,
        routes=None if micro_batch.routes is None else micro_batch.routes[:num_rows, :length],
    )


def _gap_sums(micro_batch: MicroBatch, logprobs: np.ndarray, version: int) -> dict[str, Tensor]:
    sampled = _sampled_by(micro_batch, version)
    gap = np.abs(logprobs.astype(np.float64) - micro_batch.loss_arrays["rollout_logprobs"])[sampled]  # float64[N], nats
    sums = {"gap_tokens": float(gap.size), "gap_sum": float(gap.sum()), "gap_max": float(gap.max())}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}


def _rounding_sums(sums: RoundingSums) -> dict[str, Tensor]:
    named = {
        "rounding_tokens": sums.tokens,
        "rounding_sum": sums.rounding,
        "rounding_squares": sums.squares,
        "rounding_shift": sums.shift,
    }
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in named.items()}
