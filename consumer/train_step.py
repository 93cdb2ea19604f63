"""One mini-batch through the backend, and the optimizer step when it is the last of its step.

Consumes a rank's mini-batches; produces, with the last one, the step's metrics over all ranks. Where advantages are
whitened over the step, its mini-batches are scored as they come and wait for the last one.
"""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coati_rl.algorithms.parts import KLEstimator
from coati_rl.algorithms.schedule import cosine_learning_rate
from coati_rl.algorithms.sums import merge_sums
from coati_rl.algorithms.token_advantages import advantage_sums, subtract_kl_to_go, whiten
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.config import Config
from coati_rl.observability.timeline import NO_TIMELINE, Timeline
from coati_rl.protocols import LossFn, Role, TrainBackend
from consumer.sampling_gap import SamplingGap


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """Describe what is done to a mini-batch before the loss sees it."""

    learning_rate: float
    has_reference: bool = False
    old_policy_period: int | None = None  # recompute old_logprobs, with weights of so many steps; None: do not
    reward_kl_coeff: float = 0.0  # KL in the reward; 0: there is none
    kl_estimator: KLEstimator = "k3"
    kl_clamp: float | None = None
    whitens_advantages: bool = False

    @property
    def keeps_old_policy(self) -> bool:
        """True if the policy before the update is not the one that the step begins with."""
        return (self.old_policy_period or 1) > 1


def step_settings(config: Config) -> StepSettings:
    """The trainer's share of a checked config."""
    return StepSettings(
        learning_rate=config.learning_rate,
        has_reference=config.kl_coeff > 0,
        old_policy_period=config.sync_period if config.recomputes_old_logprobs else None,
        reward_kl_coeff=config.kl_coeff if config.kl_place == "reward" else 0.0,
        kl_estimator=config.kl_estimator,
        kl_clamp=config.kl_clamp,
        whitens_advantages=config.whiten_advantages,
    )


class TrainStep:
    """Scores, accumulates, steps."""

    def __init__(
        self,
        backend: TrainBackend,
        loss_fn: LossFn,
        settings: StepSettings,
        timeline: Timeline = NO_TIMELINE,
        *,
        sampling_gap: SamplingGap | None = None,
    ) -> None:
        """`sampling_gap`: measures tokens that earlier weights sampled; None: they are not measured."""
        self._backend = backend
        self._loss_fn = loss_fn
        self._settings = settings
        self._timeline = timeline
        self._sampling_gap = sampling_gap
        self._old_step: int | None = None  # the step that began with what the backend keeps as old policy
        self._begin()

    def _begin(self) -> None:
        self._waiting: list[MiniBatch] = []  # scored, for the step's last
        self._sums: dict[str, Tensor] = {}
        self._train_s = 0.0

    def run(self, batch: MiniBatch) -> dict[str, Any] | None:
        """Returns: the step's metrics by their names in metrics.jsonl, None until the step is complete.

        On ranks without the LM head there are only those that need no loss.
        """
        begin = time.perf_counter()
        self._keep_old_policy(batch.step)
        if self._sampling_gap is not None:
            self._add(self._sampling_gap.measure(batch.micro_batches, step=batch.step))
        self._waiting.append(dataclasses.replace(batch, micro_batches=self._score(batch.micro_batches)))
        if batch.is_last or not self._settings.whitens_advantages:
            for ready in self._take_ready():
                with self._timeline.span("forward_backward"):
                    self._add(self._backend.forward_backward(ready, self._loss_fn))
        self._train_s += time.perf_counter() - begin
        return self._finish(batch) if batch.is_last else None

    def _finish(self, batch: MiniBatch) -> dict[str, Any]:
        begin = time.perf_counter()
        if self._sampling_gap is not None:
            self._sampling_gap.end_step(batch.step)
        learning_rate = cosine_learning_rate(batch.learning_rate_progress, peak=self._settings.learning_rate)
        with self._timeline.span("optimizer step", step=batch.step + 1):
            norm = self._backend.optimizer_step(loss_scale=batch.loss_scale, learning_rate=learning_rate)
        sums = self._backend.reduce_sums(self._sums)
        metrics = step_metrics(sums, loss_scale=batch.loss_scale) if sums else {}
        if self._settings.old_policy_period is None:
            metrics |= dict.fromkeys(("old_logprob_gap_mean", "old_logprob_gap_max"))
        seconds = self._train_s + time.perf_counter() - begin
        self._begin()
        return {**metrics, "grad_norm": norm, "learning_rate": learning_rate, "train_s": seconds}

    def _keep_old_policy(self, step: int) -> None:
        """Before the first step after a weight sync, or after a resume: the policy that the engines sample with."""
        period = self._settings.old_policy_period or 1
        if self._settings.keeps_old_policy and (self._old_step is None or step >= self._old_step + period):
            self._backend.keep_old_policy()
            self._old_step = step - step % period

    def _score(self, micro_batches: tuple[MicroBatch, ...]) -> tuple[MicroBatch, ...]:
        """Add the log-probabilities that only the trainer can give, and take KL off the advantages."""
        settings = self._settings
        if settings.old_policy_period is not None:
            model: Role = "old" if settings.keeps_old_policy else "policy"
            micro_batches = self._with_scores(micro_batches, "old_logprobs", model)
        if settings.has_reference:
            micro_batches = self._with_scores(micro_batches, "ref_logprobs", "reference")
        if settings.reward_kl_coeff > 0 and all(m.ref_logprobs is not None for m in micro_batches):
            micro_batches = tuple(map(self._with_reward_kl, micro_batches))
        return micro_batches

    def _with_scores(self, micro_batches: tuple[MicroBatch, ...], name: str, model: Role) -> tuple[MicroBatch, ...]:
        with self._timeline.span(f"score {model}"):
            scores = self._backend.score(micro_batches, model)
        if not scores:
            return micro_batches  # without the LM head there are none, and no loss that would miss them
        pairs = zip(micro_batches, scores, strict=True)
        return tuple(dataclasses.replace(m, **{name: score.cpu().numpy()}) for m, score in pairs)

    def _with_reward_kl(self, micro_batch: MicroBatch) -> MicroBatch:
        settings = self._settings
        changed, sums = subtract_kl_to_go(
            micro_batch, kl_coeff=settings.reward_kl_coeff, estimator=settings.kl_estimator, clamp=settings.kl_clamp
        )
        self._add(sums)
        return changed

    def _take_ready(self) -> list[MiniBatch]:
        """The mini-batches that wait, with the advantages that the loss sees."""
        ready, self._waiting = self._waiting, []
        if not self._settings.whitens_advantages:
            return ready
        sums = self._backend.reduce_sums(advantage_sums([m for batch in ready for m in batch.micro_batches]))
        if not sums:
            return ready  # no loss is computed here
        return [dataclasses.replace(b, micro_batches=tuple(whiten(m, sums) for m in b.micro_batches)) for b in ready]

    def _add(self, sums: dict[str, Tensor]) -> None:
        self._sums = merge_sums(self._sums, sums)


def step_metrics(sums: dict[str, float], *, loss_scale: float) -> dict[str, float | None]:
    """Means over the tokens of the step, from sums over all ranks; None where there is nothing to form a mean of."""

    def mean(name: str, over: str = "num_tokens") -> float | None:
        return sums[name] / sums[over] if sums.get(over) and name in sums else None

    return {
        "loss": sums["loss_sum"] * loss_scale if loss_scale else None,
        "kl_mean": mean("kl_sum"),
        "entropy_mean": mean("entropy_sum"),
        "clip_fraction": mean("clip_sum"),
        "ratio_max": sums["ratio_max"],
        "samples_skipped": sums.get("skipped_samples"),
        "correction_mean": mean("correction_sum"),
        "correction_dropped_fraction": mean("correction_dropped"),
        "logprob_gap_mean": mean("gap_sum", "gap_tokens"),
        "logprob_gap_max": sums["gap_max"] if sums["gap_tokens"] else None,
        "logprob_gap_tokens": int(sums["gap_tokens"]),
        "old_logprob_gap_mean": mean("old_gap_sum"),
        "old_logprob_gap_max": sums["old_gap_max"],
    }
