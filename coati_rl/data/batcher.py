"""Groups -> the mini-batches of one optimizer step, one per dp rank, and the step's rollout statistics.

tMbs * dp prompts make a mini-batch, tbs * dp a step. Loss weights are not normalised: the global denominator is known
with the step's last group and travels as `loss_scale` of the last mini-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coati_rl.algorithms.aggregation import LossVariation, loss_scale
from coati_rl.batch import MiniBatch
from coati_rl.data.packing import Sample, pack
from coati_rl.data.sample_builder import build_samples, is_trainable
from coati_rl.types import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """Sizes of a step and how its samples are weighed."""

    dp: int
    train_batch_size: int  # prompts per dp group and step
    train_minibatch_size: int  # prompts per dp group and mini-batch
    train_microbatch_size: int  # samples per micro-batch
    loss_variation: LossVariation
    recompute_old_logprobs: bool
    max_tokens_per_microbatch: int | None = None  # padding included; None: train_microbatch_size alone bounds
    one_sample_per_row: bool = False  # padded rows instead of packed ones

    @property
    def prompts_per_mini_batch(self) -> int:
        """Over all dp groups."""
        return self.train_minibatch_size * self.dp

    @property
    def prompts_per_step(self) -> int:
        """Over all dp groups."""
        return self.train_batch_size * self.dp


class StepBatcher:
    """Accumulates one optimizer step; a new one is made for each."""

    def __init__(self, settings: BatchSettings, *, step: int, learning_rate_progress: float) -> None:
        self._settings = settings
        self._step = step
        self._progress = learning_rate_progress
        self._num_samples = 0
        self._num_tokens = 0
        self.groups: list[RolloutGroup] = []

    @property
    def num_prompts(self) -> int:
        """Prompts taken so far."""
        return len(self.groups)

    def add(self, groups: Sequence[RolloutGroup]) -> list[MiniBatch]:
        """The next mini-batch, one share per dp rank: about as many tokens, and equally many micro-batches.

        Args:
            groups: tMbs * dp groups; sorted by uid here, so that the batch does not depend on who finished first.
        Raises: RunError if a sample alone exceeds the tokens of a micro-batch.
        """
        settings = self._settings
        groups = sorted(groups, key=lambda group: group.prompt.uid)
        self.groups.extend(groups)
        # Advantages and weights are made by group, before: from here on any sample may go to any rank.
        samples = [sample for group in groups for sample in self._build(group)]
        self._num_samples += len(samples)
        self._num_tokens += sum(int(sample.loss_mask.sum()) for sample in samples)
        is_last = self.num_prompts >= settings.prompts_per_step
        scale = loss_scale(self._num_samples, self._num_tokens, settings.loss_variation) if is_last else 1.0
        shares = pack(
            samples,
            num_ranks=settings.dp,
            max_samples=settings.train_microbatch_size,
            max_tokens=settings.max_tokens_per_microbatch,
            one_sample_per_row=settings.one_sample_per_row,
        )
        return [
            MiniBatch(
                step=self._step,
                micro_batches=micro_batches,
                is_last=is_last,
                loss_scale=scale,
                learning_rate_progress=self._progress,
                recompute_old_logprobs=settings.recompute_old_logprobs,
            )
            for micro_batches in shares
        ]

    def _build(self, group: RolloutGroup) -> list[Sample]:
        return build_samples(group, loss_variation=self._settings.loss_variation)


def rollout_statistics(groups: Sequence[RolloutGroup], staleness: Callable[[int], int]) -> dict[str, float | int]:
    """What a step's rollouts say, by the names of metrics.jsonl.

    Args:
        groups: the step's groups.
        staleness: policy version -> weight syncs since.
    """
    valid = np.concatenate([is_trainable(group) for group in groups])
    scores = [score for group in groups for score in group.scores]
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([len(completion.token_ids) for completion in completions])
    versions, counts = np.unique(np.concatenate([c.policy_versions for c in completions]), return_counts=True)
    stale = np.array([staleness(int(version)) for version in versions])

    def mean_of(values: list[float]) -> float:
        return float(np.mean(np.array(values, dtype=np.float64)[valid])) if valid.any() else 0.0

    return {
        "reward_mean": mean_of([score.reward for score in scores]),
        "answer_accuracy": mean_of([float(score.answer_correct) for score in scores]),
        "format_accuracy": mean_of([float(score.format_valid) for score in scores]),
        "samples_invalid": int((~valid).sum()),
        "response_tokens_mean": float(lengths.mean()),
        "truncated_fraction": float(np.mean([completion.is_truncated for completion in completions])),
        "staleness_mean": float(np.average(stale, weights=counts)),
        "staleness_max": int(stale.max()),
        "num_prompt_tokens": sum(len(group.prompt.token_ids) * len(group.completions) for group in groups),
        "num_response_tokens": int(lengths.sum()),
    }
