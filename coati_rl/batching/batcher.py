"""Build the mini-batches of one optimizer step from groups, one per dp rank.

tMbs * dp prompts make a mini-batch, tbs * dp a step. Loss weights are not normalised: the global denominator is known
with the step's last group and is sent as `loss_scale` of the last mini-batch. It counts the episodes in the loss, and
each of their tokens once, whether they are computed or not (`sample_selection`); without any the scale is 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coati_rl.algorithms.advantage import Estimator, Rewards
from coati_rl.algorithms.aggregation import LossVariation, loss_scale
from coati_rl.algorithms.reward_scaling import RewardScaling, fit_scaling
from coati_rl.batching.group_rules import GroupRules, is_valid
from coati_rl.batching.packing import RankSamples, plan_batches
from coati_rl.batching.sample_builder import build_samples, count_episodes, group_rewards
from coati_rl.batching.sample_selection import SampleSelection, SelectionSettings
from coati_rl.samples import RaggedBatch, Sample
from coati_rl.types import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """Hold the sizes of a step and the weighting of its samples."""

    dp: int
    train_batch_size: int  # prompts per dp rank and step
    train_minibatch_size: int  # prompts per dp rank and mini-batch
    train_microbatch_size: int  # samples per micro-batch
    loss_variation: LossVariation
    advantage_estimator: str  # its name; `load_estimator` has the function
    rules: GroupRules
    max_tokens_per_microbatch: int | None = None  # padding included; None: train_microbatch_size alone bounds
    one_sample_per_row: bool = False  # padded rows instead of packed ones
    shares_prefixes: bool = False  # tokens that a prompt's samples begin with are computed once
    num_stages: int = 1  # of the trainers' pipeline
    normalizes_rewards: bool = False  # over the valid samples of a task in a mini-batch
    reward_clip: tuple[float, float] | None = None  # of rewards, after that
    selection: SelectionSettings | None = None  # of the samples to compute; None: every one is

    @property
    def prompts_per_mini_batch(self) -> int:
        """Return the number of prompts, over all dp ranks."""
        return self.train_minibatch_size * self.dp

    @property
    def prompts_per_step(self) -> int:
        """Return the number of prompts, over all dp ranks."""
        return self.train_batch_size * self.dp


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedStep:
    """Describe the content of an optimizer step."""

    groups: Sequence[RolloutGroup]
    advantages: Mapping[tuple[str, int], float]  # of trajectories in the loss (means), by prompt uid and number
    num_computed: int  # episodes in the loss of which trainers compute a trajectory


class StepBatcher:
    """Accumulate one optimizer step; each step has a new instance."""

    def __init__(
        self, settings: BatchSettings, *, step: int, learning_rate_progress: float, estimator: Estimator
    ) -> None:
        """Begin a step; `estimator` is the function that the settings name."""
        self._settings = settings
        self._estimator = estimator
        self._step = step
        self._progress = learning_rate_progress
        self._selection = SampleSelection(settings.selection, step=step)
        self._num_episodes = 0
        self._num_computed = 0  # of these
        self._num_tokens = 0
        self._advantages: dict[tuple[str, int], float] = {}
        self.groups: list[RolloutGroup] = []

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts added so far."""
        return len(self.groups)

    def add(self, groups: Sequence[RolloutGroup]) -> list[RaggedBatch]:
        """Return the next mini-batch, split over dp ranks: similar numbers of tokens, equal numbers of micro-batches.

        Args:
            groups: tMbs * dp groups; sorted by uid here, so that the batch does not depend on the order of arrival.
        Raises: RunError if a sample alone exceeds the tokens of a micro-batch, or the estimator fails.
        """
        settings = self._settings
        groups = sorted(groups, key=lambda group: group.prompt.uid)
        self.groups.extend(groups)
        # Advantages and weights are computed per group first; then any sample may go to any rank.
        scalings = self._reward_scalings(groups)
        built = [self._build(group, scalings[group.prompt.task]) for group in groups]
        samples = [sample for each in built for sample in each]
        self._advantages |= {(sample.uid, sample.number): _advantage(sample) for sample in samples}
        self._num_episodes += sum(map(count_episodes, groups, built))
        self._num_tokens += sum(sample.num_loss_tokens for sample in samples)
        trained, measured = self._selection.split(samples, fraction=self.num_prompts / settings.prompts_per_step)
        computed = set(map(id, (*trained, *measured)))
        chosen = [[sample for sample in each if id(sample) in computed] for each in built]
        self._num_computed += sum(map(count_episodes, groups, chosen))
        is_last = self.num_prompts >= settings.prompts_per_step
        parts = zip(self._plan(trained), self._plan(measured), strict=True)
        return [
            RaggedBatch(
                step=self._step,
                samples=of_trained[0],
                plan=of_trained[1],
                measured_samples=of_measured[0],
                measured_plan=of_measured[1],
                one_sample_per_row=settings.one_sample_per_row,
                is_last=is_last,
                loss_scale=self._loss_scale() if is_last else 1.0,
                learning_rate_progress=self._progress,
            )
            for of_trained, of_measured in parts
        ]

    def close(self) -> ClosedStep:
        """Return the step's content."""
        return ClosedStep(groups=self.groups, advantages=self._advantages, num_computed=self._num_computed)

    def _plan(self, samples: Sequence[Sample]) -> list[RankSamples]:
        settings = self._settings
        shares = plan_batches(
            samples,
            num_ranks=settings.dp,
            max_samples=settings.train_microbatch_size,
            max_tokens=settings.max_tokens_per_microbatch,
            one_sample_per_row=settings.one_sample_per_row,
            shares_prefixes=settings.shares_prefixes,
            num_stages=settings.num_stages,
        )
        if settings.selection is None:
            return shares
        # The first rank alone measures the mismatch of earlier weights: the share with most tokens in the loss has at
        # least a dp-th of `min_tokens`.
        return sorted(shares, key=lambda share: -share[0].num_loss_tokens)

    def _build(self, group: RolloutGroup, scaling: RewardScaling) -> list[Sample]:
        settings = self._settings
        return build_samples(
            group,
            rules=settings.rules,
            loss_variation=settings.loss_variation,
            estimator=self._estimator,
            scaling=scaling,
        )

    def _reward_scalings(self, groups: Sequence[RolloutGroup]) -> dict[str, RewardScaling]:
        """Return the scaling of each task's rewards in a mini-batch."""
        rewards: dict[str, list[Rewards]] = {}
        for group in groups:
            rewards.setdefault(group.prompt.task, []).append(group_rewards(group)[is_valid(group)])
        is_normalized, clip = self._settings.normalizes_rewards, self._settings.reward_clip
        return {task: fit_scaling(each, is_normalized=is_normalized, clip=clip) for task, each in rewards.items()}

    def _loss_scale(self) -> float:
        if self._num_episodes == 0:
            return 0.0
        return loss_scale(self._num_episodes, self._num_tokens, self._settings.loss_variation)


def _advantage(sample: Sample) -> float:
    """Return a sample's advantage, the mean over its tokens where turns have their own."""
    return float(np.mean(sample.arrays["advantages"]))
