"""Run a trainer that takes the optimizer steps of recorded rollouts, through the real batcher and train step."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from coati_rl.algorithms.advantage import ADVANTAGE_ESTIMATORS
from coati_rl.algorithms.aggregation import LossVariation
from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batching.batcher import BatchSettings, StepBatcher
from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.packing import build_mini_batch
from coati_rl.batching.sample_selection import SelectionSettings
from coati_rl.types import Completion, Prompt, RolloutGroup, Score
from coati_rl.work import RepeatWork
from consumer.backend import Backend
from consumer.logprob_mismatch import MismatchMeter
from consumer.models.weight_history import WeightHistory
from consumer.objectives.policy_gradient import PolicyGradient
from consumer.optim.learning_rate import LearningRate
from consumer.train_step import TrainStep
from producer.environments.single_turn import single_turns
from tests.integration.consumer.conftest import LAYOUTS, reference_of
from tests.integration.consumer.trainer import make_trainer

PROMPTS_PER_STEP = 4
MAX_NEW_TOKENS = 32
# How each layout executes the same experiment; all but the first differ in everything that must not matter.
EXECUTION = {
    "dp1": {"train_minibatch_size": 4, "train_microbatch_size": 16},
    "dp2": {"train_minibatch_size": 1, "train_microbatch_size": 3, "shares_prefixes": True},
    "tp2": {"train_minibatch_size": 2, "train_microbatch_size": 4, "one_sample_per_row": True},
    "pp2": {
        "train_minibatch_size": 2,
        "train_microbatch_size": 8,
        "max_tokens_per_microbatch": 64,
        "shares_prefixes": True,
    },
    "tp2_pp2": {"train_minibatch_size": 4, "train_microbatch_size": 5, "shares_prefixes": True},
    "pp2_dp2": {"train_minibatch_size": 2, "train_microbatch_size": 4},
    "fsdp2_dp2": {"train_minibatch_size": 2, "train_microbatch_size": 3, "shares_prefixes": True},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Describe how the recording is replayed."""

    objective: PolicyGradient
    loss_variation: LossVariation = "token_level"
    advantage_estimator: str = "group_norm"
    has_equal_rewards: bool = False  # the second half of each step's groups; of step 1 all
    selection: SelectionSettings | None = None  # None: every sample is computed


LEARNING_RATE, KL_COEFF = 1e-3, 0.1
REPLAYS = {
    "grpo": Replay(
        objective=PolicyGradient(loss=PolicyLoss(kl_coeff=KL_COEFF, clip_high=0.28), has_reference=True),
    ),
    "reinforce_pp": Replay(
        objective=PolicyGradient(
            loss=PolicyLoss(),
            has_reference=True,
            reward_kl_coeff=KL_COEFF,
            kl_estimator="k1",
            whitens=True,
        ),
        loss_variation="sample_level",  # by token, whitened advantages have a loss of 0
        advantage_estimator="reward",
    ),
    "gspo": Replay(
        objective=PolicyGradient(loss=PolicyLoss(ratio_level="sequence", clip_low=0.01, clip_high=0.02)),
        loss_variation="sample_level",
    ),
    "old_policy": Replay(
        objective=PolicyGradient(
            loss=PolicyLoss(correction="tis", correction_low=0.9, correction_high=1.1), old_policy_period=2
        ),
    ),
    "skip": Replay(objective=PolicyGradient(loss=PolicyLoss(skip_threshold=1.2))),
    "updates": Replay(
        objective=PolicyGradient(
            loss=PolicyLoss(kl_coeff=KL_COEFF), has_reference=True, old_policy_period=4, updates_per_batch=2
        ),
    ),
}
# The same steps with and without the samples that have no gradient. In dp2 and pp2 each second mini-batch has none.
_CLIPPED = PolicyGradient(loss=PolicyLoss(), old_policy_period=2)
SELECTIONS = {
    "all_computed": Replay(objective=_CLIPPED, has_equal_rewards=True),
    "selected": Replay(objective=_CLIPPED, has_equal_rewards=True, selection=SelectionSettings(min_tokens=0, seed=0)),
}
# Of a replay with two updates per batch: the optimizer step that first trained the batch of each step, K = 2.
FIRST_STEPS = (0, 1, 0, 1, 4)


def whitened_by_rank() -> None:
    """Each rank whitens with the sums of its own tokens."""
    right = Backend.reduce_sums

    def own_sums(backend: Backend, sums: dict[str, Tensor]) -> dict[str, float]:
        return {n: float(s) for n, s in sums.items()} if "advantage_tokens" in sums else right(backend, sums)

    Backend.reduce_sums = own_sums


def read_groups(recording: Path) -> list[list[RolloutGroup]]:
    """Step by step."""
    return [[read_group(group) for group in step] for step in json.loads(recording.read_text())]


def read_group(group: dict[str, Any]) -> RolloutGroup:
    """A recorded prompt and its samples."""
    prompt = Prompt(uid=group["uid"], token_ids=tuple(group["prompt"]), ground_truth="")
    completions = [
        Completion(
            token_ids=np.array(sample["token_ids"], dtype=np.int32),
            logprobs=np.array(sample["logprobs"], dtype=np.float32),
            policy_versions=np.zeros(len(sample["token_ids"]), dtype=np.int32),
            finish_reason="stop",
            text="",
        )
        for sample in group["samples"]
    ]
    return RolloutGroup(
        lease_id=0,
        producer_id=0,
        prompt=prompt,
        temperature=group["temperature"],
        trajectories=single_turns(prompt, completions, temperature=group["temperature"]),
        scores=tuple(
            Score(reward=sample["reward"], answer_correct=False, format_valid=True, verdict="ok")
            for sample in group["samples"]
        ),
    )


def with_equal_rewards(group: RolloutGroup) -> RolloutGroup:
    """All of its samples have the first one's score."""
    return dataclasses.replace(group, scores=group.scores[:1] * len(group.scores))


def take_steps(model_dir: Path, steps: list[list[RolloutGroup]], layout: str, replay: Replay) -> list[dict[str, Any]]:
    """The metrics of every step; empty on ranks that do not report."""
    backend = make_trainer(
        model_dir,
        reference_dir=reference_of(model_dir) if replay.objective.has_reference else None,
        keeps_old_policy=replay.objective.keeps_old_policy,
        gradient_checkpointing=layout == "tp2_pp2",
        **LAYOUTS[layout][1],
    )
    place = backend.layout
    settings = BatchSettings(
        dp=place.dp_size,
        train_batch_size=PROMPTS_PER_STEP // place.dp_size,
        loss_variation=replay.loss_variation,
        advantage_estimator=replay.advantage_estimator,
        rules=GroupRules(max_new_tokens=MAX_NEW_TOKENS),
        selection=replay.selection,
        **EXECUTION[layout],
    )
    # On every copy, unlike in a run, so that the metrics are alike in all layouts.
    history = WeightHistory(backend.live_weights(), max_versions=len(steps))
    meter = MismatchMeter(backend, history, num_tokens=MAX_NEW_TOKENS * 1000, sync_period=1)
    rate = LearningRate(peak=LEARNING_RATE)
    train_step = TrainStep(backend, replay.objective, learning_rate=rate, mismatch_meter=meter)
    estimator, metrics = ADVANTAGE_ESTIMATORS[replay.advantage_estimator], []
    for step, groups in enumerate(steps):
        if replay.objective.updates_per_batch > 1 and (first := FIRST_STEPS[step]) < step:
            work = RepeatWork(step=step, first_step=first, is_last=True, learning_rate_progress=step / 10)
            metrics.append(train_step.repeat(work))
            continue
        if replay.has_equal_rewards:
            num_varied = 0 if step == 1 else PROMPTS_PER_STEP // 2
            groups = [*groups[:num_varied], *map(with_equal_rewards, groups[num_varied:])]
        batcher = StepBatcher(settings, step=step, learning_rate_progress=step / 10, estimator=estimator)
        size = settings.prompts_per_mini_batch
        for first in range(0, len(groups), size):
            metrics.append(train_step.run(build_mini_batch(batcher.add(groups[first : first + size])[place.dp_rank])))
        if metrics[-1] is not None:
            metrics[-1] |= {"samples_computed": batcher.close().num_computed}
    backend.close()
    return [step for step in metrics if step is not None] if place.is_reporter else []


def run_replays(
    _: int, out_dir: Path, model_dir: Path, recording: Path, replays: Sequence[tuple[str, str]], is_faulty: bool = False
) -> None:
    """`replays`: layout and name of each. `is_faulty`: ranks whiten with their own sums."""
    if is_faulty:
        whitened_by_rank()
    for layout, name in replays:
        metrics = take_steps(model_dir, read_groups(recording), layout, (REPLAYS | SELECTIONS)[name])
        if metrics:
            (out_dir / f"{layout}-{name}.json").write_text(json.dumps(metrics))
