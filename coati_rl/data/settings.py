"""What the coordinator has to know of a run's configuration."""

from dataclasses import dataclass

from coati_rl.config import Config
from coati_rl.data.batcher import BatchSettings
from coati_rl.data.leases import SamplingPlan
from coati_rl.types import Purpose, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSettings:
    """Sizes, periods and limits; see DESIGN's version algebra."""

    batch: BatchSettings
    sampling_plans: dict[Purpose, SamplingPlan]
    num_slots: int
    sync_period: int  # optimizer steps
    num_trainers: int
    ranks_per_dp_group: int  # tp * pp
    max_steps: int | None
    eval_interval: int | None  # optimizer steps; None is off
    save_interval: int | None
    max_failed_samples: int  # per optimizer step
    seed: int

    def num_prompts_due(self, num_prompts: int) -> int:
        """Prompts that the run will train at most, given those of all episodes."""
        limit = num_prompts if self.max_steps is None else self.max_steps * self.batch.prompts_per_step
        return max(1, min(num_prompts, limit))


def coordinator_settings(config: Config) -> CoordinatorSettings:
    """The coordinator's share of a checked config."""
    sampling = SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.max_new_tokens,
        stop=tuple(config.stop),
    )
    greedy = SamplingParams(temperature=0.0, max_new_tokens=config.max_new_tokens, stop=tuple(config.stop))
    return CoordinatorSettings(
        batch=BatchSettings(
            dp=config.dp,
            train_batch_size=config.train_batch_size,
            train_minibatch_size=config.train_minibatch_size,
            train_microbatch_size=config.train_microbatch_size,
            loss_variation=config.loss_variation,
            # Engines renormalise log-probabilities under top-k and top-p; the trainer's softmax is over all tokens.
            recompute_old_logprobs=config.top_k is not None or config.top_p < 1.0,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            one_sample_per_row=config.one_sample_per_row,
        ),
        sampling_plans={
            "train": SamplingPlan(group_size=config.num_generations, sampling=sampling),
            "eval": SamplingPlan(group_size=1, sampling=greedy),
        },
        num_slots=config.num_slots,
        sync_period=config.sync_period,
        num_trainers=config.num_trainers,
        ranks_per_dp_group=config.num_trainers // config.dp,
        max_steps=config.max_steps,
        eval_interval=config.eval_interval if config.eval_dataset and config.eval_interval > 0 else None,
        save_interval=config.save_interval if config.save_interval > 0 else None,
        max_failed_samples=int(config.max_failure_rate * config.prompts_per_step * config.num_generations),
        seed=config.seed,
    )
