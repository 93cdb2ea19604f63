"""Select what the coordinator has to know of a run's configuration."""

from dataclasses import dataclass, field

from coati_rl.config import Config
from coati_rl.coordinator.leases import SamplingPlan
from coati_rl.coordinator.logprob_mismatch import MismatchSettings, Precision
from coati_rl.data.batcher import BatchSettings
from coati_rl.data.group_rules import GroupRules
from coati_rl.types import Purpose, SamplingParams

_PROBE_TOKENS = 256  # enough for a mean that is not noise, cheap for any model


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSettings:
    """Sizes, periods and limits; see DESIGN's version algebra."""

    batch: BatchSettings
    sampling_plans: dict[Purpose, SamplingPlan]
    n_behind: int  # syncs
    sync_period: int  # optimizer steps
    num_trainers: int
    ranks_per_dp_group: int  # tp * pp
    max_steps: int | None
    eval_interval: int | None  # optimizer steps; None is off
    save_interval: int | None
    max_failed_samples: int  # per optimizer step
    dynamic_batching: bool  # a group without effect is replaced; else it takes its place in the step
    max_empty_groups: int  # in a row without effect, at which the run stops
    seed: int
    gap: MismatchSettings = field(default_factory=MismatchSettings)
    probe_interval: int = 1  # weight syncs
    max_probe_tokens: int = 3
    inflight_update: bool = False  # weights change while responses are generated

    @property
    def prompts_per_rollout(self) -> int:
        """Trained between two syncs."""
        return self.sync_period * self.batch.prompts_per_step

    @property
    def num_slots(self) -> int:
        """Prompts that may be rolled out ahead of the weights."""
        return (self.n_behind + 1) * self.prompts_per_rollout

    def learning_rate_progress(self, *, step: int, num_settled: int, num_prompts: int | None) -> float:
        """Return how much of the run is behind it, by the clock that will end it: optimizer steps or prompts.

        Where groups are replaced, prompts run ahead of steps.

        Args:
            step: optimizer steps taken.
            num_settled: prompts trained or dropped.
            num_prompts: of all episodes; None: they have no end.
        Returns: in [0, 1].
        """
        by_steps = 0.0 if self.max_steps is None else step / self.max_steps
        by_prompts = 0.0 if num_prompts is None else num_settled / num_prompts
        return min(1.0, max(by_steps, by_prompts))


def coordinator_settings(config: Config, *, precision: Precision = "fp32") -> CoordinatorSettings:
    """The coordinator's share of a checked config; `precision` is the plan's."""
    algorithm, parallel, sync, run = config.algorithm, config.parallel, config.sync, config.run
    max_new_tokens = min(config.sampling.max_new_tokens, config.max_response_tokens)
    sampling = SamplingParams(
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
        max_new_tokens=max_new_tokens,
        stop=tuple(config.sampling.stop),
    )
    greedy = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, stop=tuple(config.sampling.stop))
    return CoordinatorSettings(
        batch=BatchSettings(
            dp=config.dp,
            train_batch_size=parallel.train_batch_size,
            train_minibatch_size=parallel.train_minibatch_size,
            train_microbatch_size=parallel.train_microbatch_size,
            loss_variation=algorithm.loss_variation,
            advantage_estimator=algorithm.advantage_estimator,
            rules=GroupRules(
                max_new_tokens=config.max_response_tokens,
                filter_range=algorithm.filter_range,
                filter_truncated_response=algorithm.filter_truncated_response,
                over_length_cache=config.over_length_cache,
                reward_scale=algorithm.reward_scale,
            ),
            max_tokens_per_microbatch=parallel.max_tokens_per_microbatch,
            one_sample_per_row=parallel.one_sample_per_row,
        ),
        sampling_plans={
            "train": SamplingPlan(group_size=config.sampling.num_generations, sampling=sampling),
            "eval": SamplingPlan(group_size=1, sampling=greedy),
        },
        n_behind=sync.n_behind,
        sync_period=config.sync_period,
        num_trainers=parallel.num_trainers,
        ranks_per_dp_group=parallel.num_trainers // config.dp,
        max_steps=config.data.max_steps,
        eval_interval=run.eval_interval if config.data.eval_dataset and run.eval_interval > 0 else None,
        save_interval=run.save_interval if run.save_interval > 0 else None,
        max_failed_samples=int(run.max_failure_rate * config.prompts_per_step * config.sampling.num_generations),
        dynamic_batching=algorithm.dynamic_batching,
        max_empty_groups=algorithm.max_empty_batches * config.prompts_per_step,
        seed=run.seed,
        gap=MismatchSettings(
            precision=precision,
            limit=sync.max_logprob_gap,
            # What is corrected for is no reason to stop, and what is renormalised is apart in any case.
            judges_sampled=not config.recomputes_old_logprobs,
            temperature=config.sampling.temperature,
            on_gap=sync.on_logprob_gap,
        ),
        probe_interval=sync.probe_interval,
        inflight_update=sync.inflight_update,
        max_probe_tokens=min(_PROBE_TOKENS, config.max_model_len - 1),
    )
