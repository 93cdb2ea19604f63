"""The whole configuration: one flat model, so that a YAML key, a flag and an attribute have the same name."""

from typing import Self

from pydantic import ConfigDict, model_validator

from coati_rl.algorithms.choices import CORRECTION_BOUNDS
from coati_rl.config.algorithm import AlgorithmConfig
from coati_rl.config.data import DataConfig
from coati_rl.config.model import ModelConfig
from coati_rl.config.parallel import ParallelConfig
from coati_rl.config.reward import RewardConfig
from coati_rl.config.run import RunConfig
from coati_rl.config.sampling import SamplingConfig
from coati_rl.config.sync import WeightSyncConfig


class Config(
    ModelConfig, DataConfig, SamplingConfig, RewardConfig, AlgorithmConfig, ParallelConfig, WeightSyncConfig, RunConfig
):
    """A run's settings, each validated alone; `rules.check` validates them together."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="after")
    def _interval_is_positive_or_off(self) -> Self:
        for name in ("eval_interval", "save_interval"):
            value = getattr(self, name)
            if value == 0 or value < -1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: use a positive number of steps, or -1 for off")
        return self

    @property
    def dp(self) -> int:
        """Data-parallel trainer groups."""
        return self.num_trainers // (self.tensor_parallel_size * self.pipeline_parallel_size)

    @property
    def prompts_per_step(self) -> int:
        """Prompts of one optimizer step, over all dp groups."""
        return self.train_batch_size * self.dp

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of one rollout step, over all producers."""
        return self.num_inferencer * self.inference_batch_size

    @property
    def sequences_in_flight(self) -> int:
        """Samples that a producer generates at a time: those of -imbs prompts."""
        return self.inference_microbatch_size * self.num_generations

    @property
    def sync_period(self) -> int:
        """K: optimizer steps between weight syncs."""
        return self.prompts_per_rollout // self.prompts_per_step

    @property
    def num_slots(self) -> int:
        """Prompts that may be rolled out ahead of the weights."""
        return (self.n_behind + 1) * self.prompts_per_rollout

    @property
    def num_devices(self) -> int:
        """GPUs of a run in GPU mode."""
        return self.num_inferencer * self.producer_tensor_parallel_size + self.num_trainers

    @property
    def recomputes_old_logprobs(self) -> bool:
        """True if old_logprobs are the trainer's own: asked for, or as the engine's would not do.

        Engines renormalise under top-k and top-p, while the trainer's softmax is over all tokens; a correction compares
        the two.
        """
        return self.old_logprobs == "trainer" or self.renormalises or self.off_policy_correction != "none"

    def with_gap_correction(self) -> Self:
        """Return the same run with the correction that --on-logprob-gap names; itself if it names none, or has one."""
        correction = self.on_logprob_gap
        if correction == "stop" or self.off_policy_correction != "none":
            return self
        bounds = CORRECTION_BOUNDS.get(correction, {})
        return self.model_copy(update={"off_policy_correction": correction, **bounds})

    @property
    def renormalises(self) -> bool:
        """True if engines sample from a part of the vocabulary, and give probabilities over that part."""
        return self.top_k is not None or self.top_p < 1.0

    @property
    def num_kept_versions(self) -> int:
        """Weights of earlier syncs that trainers keep, with which tokens may have been sampled.

        The trainers' own weights are those of the last sync in its first step only.
        """
        return self.n_behind + (self.sync_period > 1) if self.logprob_gap_tokens else 0

    @property
    def over_length_cache(self) -> int | None:
        """Tokens before the length limit over which the punishment grows; None: there is none."""
        if not self.soft_over_length_punishment:
            return None
        return self.cache_length or max(1, min(1024, self.max_response_tokens // 4))

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest episode, prompt included."""
        return self.max_episode_tokens or self.max_prompt_tokens + self.max_new_tokens

    @property
    def max_response_tokens(self) -> int:
        """Tokens that an episode may have after its prompt: L_max of length rules and normalisation."""
        return self.max_model_len - self.max_prompt_tokens
