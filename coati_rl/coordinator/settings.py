"""Select the coordinator's settings from a run's configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from coati_rl.algorithms.advantage import GDPO
from coati_rl.batching.batcher import BatchSettings
from coati_rl.batching.group_rules import GroupRules, LengthLimit
from coati_rl.batching.sample_selection import SelectionSettings
from coati_rl.config import Config
from coati_rl.config.sync import SyncConfig
from coati_rl.coordinator.leases import SamplingPlan
from coati_rl.coordinator.logprob_mismatch import MIN_SAMPLED_TOKENS, MismatchSettings, Precision
from coati_rl.plugins import is_plugin
from coati_rl.types import CUTS, DEFAULT_TASK, Purpose, SamplingParams

_PROBE_TOKENS = 256  # enough for a stable mean, cheap for any model


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSettings:
    """Hold sizes, periods and limits."""

    batch: BatchSettings
    sampling_plans: dict[Purpose, SamplingPlan]
    sync: SyncConfig
    sync_period: int  # optimizer steps
    num_trainers: int
    trainers_per_dp_rank: int  # tp * pp * cp
    max_steps: int | None
    eval_interval: int | None  # optimizer steps; None is off
    save_interval: int | None
    max_failure_rate: float  # share of failed samples, past which the run stops
    dynamic_batching: bool  # a group without effect is replaced; else it counts for the step
    max_empty_groups: int  # consecutive groups without effect, at which the run stops
    seed: int
    takes_turns: bool = False  # producers and trainers share their devices
    updates_per_batch: int = 1  # optimizer steps on each batch
    mismatch: MismatchSettings = field(default_factory=MismatchSettings)
    max_probe_tokens: int = 3
    replays_routes: bool = False  # trainers compute with the experts that engines chose, of probes, too
    tasks: tuple[str, ...] = ()  # of the training prompts; () where they are of one, which has no figures of its own

    @property
    def prompts_per_rollout(self) -> int:
        """Return the number of prompts trained between two syncs."""
        return self.sync_period // self.updates_per_batch * self.batch.prompts_per_step

    @property
    def num_slots(self) -> int:
        """Return the number of prompts that may be rolled out ahead of the weights."""
        return (self.sync.n_behind + 1) * self.prompts_per_rollout

    def learning_rate_progress(self, *, step: int, num_done: float, num_prompts: int | None) -> float:
        """Return the completed fraction of the run, by optimizer steps or prompts, whichever ends it first.

        If groups are replaced, prompts run ahead of steps.

        Args:
            step: optimizer steps taken.
            num_done: prompts trained or dropped; those whose updates are not all taken count in part.
            num_prompts: of all episodes; None: endless.
        Returns: in [0, 1].
        """
        by_steps = 0.0 if self.max_steps is None else step / self.max_steps
        by_prompts = 0.0 if num_prompts is None else num_done / num_prompts
        return min(1.0, max(by_steps, by_prompts))


def coordinator_settings(
    config: Config, *, precision: Precision = "fp32", tasks: Sequence[str] = (DEFAULT_TASK,)
) -> CoordinatorSettings:
    """Return the coordinator's settings of a checked config.

    Args:
        config: of the run.
        precision: the plan's.
        tasks: of the training prompts.
    """
    algorithm, parallel, run = config.algorithm, config.parallel, config.run
    return CoordinatorSettings(
        batch=BatchSettings(
            dp=config.dp,
            train_batch_size=parallel.train_batch_size,
            train_minibatch_size=parallel.train_minibatch_size,
            train_microbatch_size=parallel.train_microbatch_size,
            loss_variation=algorithm.loss_variation,
            advantage_estimator=algorithm.advantage_estimator,
            rules=_group_rules(config),
            max_tokens_per_microbatch=parallel.max_tokens_per_microbatch,
            one_sample_per_row=parallel.one_sample_per_row,
            shares_prefixes=config.shares_prefixes,
            num_stages=parallel.pipeline_parallel_size,
            normalizes_rewards=config.reward.reward_normalize,
            reward_clip=config.reward.reward_clip,
            selection=selection_settings(config),
        ),
        sampling_plans={
            "train": replace(
                _sampling_plan(config, _sampling, group_size=config.sampling.num_generations),
                has_baseline=config.algorithm.has_baseline,
            ),
            "eval": _sampling_plan(config, _evaluation, group_size=config.sampling.eval_samples),
        },
        sync=config.sync,
        sync_period=config.sync_period,
        takes_turns=config.takes_turns,
        num_trainers=parallel.num_trainers,
        trainers_per_dp_rank=parallel.num_trainers // config.dp,
        max_steps=config.data.max_steps,
        eval_interval=run.eval_interval if config.data.eval_dataset and run.eval_interval > 0 else None,
        save_interval=run.save_interval if run.save_interval > 0 else None,
        max_failure_rate=run.max_failure_rate,
        dynamic_batching=algorithm.dynamic_batching,
        max_empty_groups=algorithm.max_empty_batches * config.prompts_per_step,
        seed=run.seed,
        updates_per_batch=algorithm.updates_per_batch,
        mismatch=MismatchSettings(
            precision=precision,
            # A corrected mismatch is no reason to stop, and a renormalised distribution always differs.
            judges_sampled=not config.recomputes_old_logprobs,
            temperature=min(config.of_task(task).sampling.temperature for task in tasks),
        ),
        replays_routes=config.router_replay == "rollout",
        max_probe_tokens=min(_PROBE_TOKENS, config.max_model_len - 1),
        tasks=tuple(tasks) if len(tasks) > 1 else (),
    )


def selection_settings(config: Config) -> SelectionSettings | None:
    """Return how the samples to compute are selected; None if a sample of advantage 0 has, or may have, a gradient."""
    algorithm = config.algorithm
    if (
        config.parallel.compute_all_samples
        or algorithm.kl_coeff > 0
        or algorithm.entropy_coeff > 0
        or algorithm.aux_loss_coeff > 0
        or config.control.entropy_target is not None
        or algorithm.whiten_advantages
        or algorithm.token_selection != "all"  # compares tokens of all samples
        or is_plugin(algorithm.policy_loss)
        or config.distillation.teacher is not None
        or config.algorithm.has_critic
    ):
        return None
    # The first dp rank alone measures tokens that earlier weights sampled; it has at least a dp-th of what is computed.
    of_earlier_weights = config.sync.logprob_gap_tokens * config.dp if config.num_kept_versions else 0
    return SelectionSettings(min_tokens=max(MIN_SAMPLED_TOKENS, of_earlier_weights), seed=config.run.seed)


def _group_rules(config: Config) -> GroupRules:
    """Return the rules by which episodes are trained, and length penalties."""
    algorithm = config.algorithm
    return GroupRules(
        max_new_tokens=config.max_response_tokens,
        filter_range=algorithm.filter_range,
        filter_truncated_response=algorithm.filter_truncated_response,
        over_length_cache=config.over_length_cache,
        reward_scale=algorithm.reward_scale,
        length_limits={
            name: LengthLimit(max_new_tokens=each.max_response_tokens, over_length_cache=each.over_length_cache)
            for name, each in config.by_task.items()
            if each.max_response_tokens != config.max_response_tokens
        },
        decoupled_weights=_decoupled_weights(config),
        turn_discount=algorithm.turn_advantages,
        has_token_rewards=config.algorithm.has_critic,
    )


def _decoupled_weights(config: Config) -> dict[str, dict[str, float]]:
    """Return the weights of the rewards that GDPO normalises one by one, by task; none for another estimator."""
    if config.algorithm.advantage_estimator != GDPO:
        return {}
    weights = {name: each.reward.weights for name, each in config.by_task.items()}
    return {name: each for name, each in weights.items() if len(each) > 1}


def _sampling_plan(config: Config, sampling: Callable[[Config], SamplingParams], *, group_size: int) -> SamplingPlan:
    """Return how prompts of one purpose are sampled; `sampling` reads it from the settings of a task."""
    usual = sampling(config)
    of_tasks = {name: params for name, each in config.by_task.items() if (params := sampling(each)) != usual}
    return SamplingPlan(group_size=group_size, sampling=usual, of_tasks=of_tasks)


def _sampling(config: Config) -> SamplingParams:
    sampling = config.sampling
    usual = _evaluation(config)
    return replace(usual, temperature=sampling.temperature, **{name: getattr(sampling, name) for name in CUTS})


def _evaluation(config: Config) -> SamplingParams:
    sampling = config.sampling
    return SamplingParams(
        temperature=sampling.eval_temperature,
        top_p=sampling.eval_top_p,
        max_new_tokens=min(sampling.max_new_tokens, config.max_response_tokens),
        stop=tuple(sampling.stop),
    )
