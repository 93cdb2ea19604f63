"""The configuration of a reinforcement learning run: its sections, and the numbers that follow from several of them."""

import functools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Self

from coati_rl.algorithms.choices import CORRECTION_BOUNDS
from coati_rl.config.algorithm import PRESET_FIELDS, AlgorithmConfig
from coati_rl.config.control import ControlConfig
from coati_rl.config.critic import CriticConfig
from coati_rl.config.data import DataConfig
from coati_rl.config.distillation import DistillationConfig
from coati_rl.config.environment import EnvironmentConfig
from coati_rl.config.fields import Section
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.parallel import ParallelConfig
from coati_rl.config.presets import read_preset
from coati_rl.config.reward import RewardConfig
from coati_rl.config.run import RunConfig
from coati_rl.config.sampling import SamplingConfig
from coati_rl.config.sync import SyncConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.config.untrained_flags import penalty_refusal
from coati_rl.generator_spec import GENERATED
from coati_rl.reward_spec import ENVIRONMENT_REWARD, NO_REWARD, RewardActors
from coati_rl.types import DEFAULT_TASK

_SECTIONS = (
    "model",
    "data",
    "sampling",
    "environment",
    "reward",
    "algorithm",
    "control",
    "critic",
    "distillation",
    "lora",
    "optimizer",
    "parallel",
    "cluster",
    "sync",
    "run",
)

# The prompts of a batch, and those of a part of it, which divide them.
_PARTS = {"inference_batch_size": "inference_microbatch_size", "train_batch_size": "train_minibatch_size"}


class Config(TrainingConfig):
    """A run's settings, each validated alone; `rules.check` validates them together."""

    COMMAND: ClassVar[str] = "python rl_example.py"
    PASSES: ClassVar[str] = "--num-episodes"
    SUMMARY: ClassVar[str] = "Reinforcement learning of a language model: vLLM producers, ColossalAI trainers, rewards."

    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    control: ControlConfig = ControlConfig()
    critic: CriticConfig = CriticConfig()
    distillation: DistillationConfig = DistillationConfig()
    parallel: ParallelConfig = ParallelConfig()
    sync: SyncConfig = SyncConfig()
    run: RunConfig = RunConfig()

    @classmethod
    @functools.cache
    def sections(cls) -> Mapping[str, type[Section]]:
        """Return the section classes by name, in the order of --help."""
        found = super().sections()
        return {name: found[name] for name in _SECTIONS}

    @classmethod
    def refusal(cls, name: str, value: Any) -> str | None:
        """Return why a run has no penalties of tokens; None for another name."""
        return penalty_refusal(name, value)

    @classmethod
    def _completed(cls, flat: dict[str, Any]) -> dict[str, Any]:
        """A preset of one's own may set the optimizer, an environment gives its own rewards, and parts divide batches.

        `AlgorithmConfig` takes the rest of the preset.
        """
        preset = read_preset(str(flat.get("algo", "GRPO")), PRESET_FIELDS)
        follows = {name: value for name, value in preset.items() if name in OptimizerConfig.model_fields}
        if flat.get("env") is not None or flat.get("agent_command") is not None:
            follows["reward_type"] = ENVIRONMENT_REWARD
        return follows | _parts_of_batches(flat) | flat

    def of_task(self, name: str) -> Self:
        """Return the settings of a task's rows: the run's, with what the task sets for itself."""
        task = (self.data.tasks or {}).get(name)
        changes: dict[str, Any] = {} if task is None else task.given
        if name in self.data.generated_tasks and self.reward.reward_type != NO_REWARD:
            changes = {"reward_type": GENERATED, "reward_combine": None} | changes
        return self.with_changes(tasks=None, **changes)

    @property
    def by_task(self) -> dict[str, Self]:
        """Return the settings of every task that rows may have, the run's own first, under "default"."""
        named = self.data.dataset if isinstance(self.data.dataset, dict) else {}
        names = dict.fromkeys((DEFAULT_TASK, *(self.data.tasks or {}), *named, *self.data.generated_tasks))
        return {name: self.of_task(name) for name in names}

    @property
    def max_sample_tokens(self) -> int:
        return self.max_model_len

    @property
    def prompts_per_step(self) -> int:
        """Prompts of one optimizer step, over all dp groups."""
        return self.parallel.train_batch_size * self.dp

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts of one rollout step, over all producers."""
        return self.parallel.num_inferencer * self.parallel.inference_batch_size

    @property
    def sequences_in_flight(self) -> int:
        """Samples that a producer generates at a time: those of -imbs prompts, greedy answers to them included."""
        answers_per_prompt = self.sampling.num_generations + self.algorithm.has_baseline
        return self.parallel.inference_microbatch_size * answers_per_prompt

    @property
    def sync_period(self) -> int:
        """Optimizer steps between weight syncs: K batches of --updates-per-batch each."""
        return self.prompts_per_rollout // self.prompts_per_step * self.algorithm.updates_per_batch

    @property
    def num_slots(self) -> int:
        """Prompts that may be rolled out ahead of the weights."""
        return (self.sync.n_behind + 1) * self.prompts_per_rollout

    @property
    def reward_models(self) -> RewardActors:
        """The actors of the reward models of all tasks."""
        directories = [model for each in self.by_task.values() for model in each.reward.models]
        return RewardActors.of(directories, num_devices=self.reward.reward_devices)

    @property
    def recomputes_old_logprobs(self) -> bool:
        """True if old_logprobs are the trainer's own: asked for, or as the engine's would not do.

        Engines renormalise under top-k, top-p and min-p, while the trainer's softmax is over all tokens; a correction
        compares the two.
        """
        algorithm = self.algorithm
        return algorithm.old_logprobs == "trainer" or self.renormalises or algorithm.off_policy_correction != "none"

    def with_gap_correction(self) -> Self:
        """Return the same run with the correction that --on-logprob-gap names; itself if it names none, or has one."""
        correction = self.sync.on_logprob_gap
        if correction == "stop" or self.algorithm.off_policy_correction != "none":
            return self
        bounds = CORRECTION_BOUNDS.get(correction, {})
        return self.with_changes(off_policy_correction=correction, **bounds)

    @property
    def renormalises(self) -> bool:
        """True if engines sample from a part of the vocabulary, for any task, and give probabilities over that part."""
        return any(each.sampling.cuts for each in self.by_task.values())

    @property
    def num_kept_versions(self) -> int:
        """Weights of earlier syncs that trainers keep, with which tokens may have been sampled.

        The trainers' own weights are those of the last sync in its first step only. Later updates of a batch are not
        measured.
        """
        return (
            self.sync.n_behind + (self.prompts_per_rollout > self.prompts_per_step)
            if self.sync.logprob_gap_tokens
            else 0
        )

    @property
    def over_length_cache(self) -> int | None:
        """Tokens before the length limit over which the punishment grows; None: there is none."""
        if not self.algorithm.soft_over_length_punishment:
            return None
        return self.algorithm.cache_length or max(1, min(1024, self.max_response_tokens // 4))

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest episode, prompt included; without an environment it is one answer."""
        one_answer = self.data.max_prompt_tokens + self.sampling.max_new_tokens
        episode = self.sampling.max_episode_tokens or one_answer
        return episode if self.environment.is_given else min(episode, one_answer)

    @property
    def max_response_tokens(self) -> int:
        """Tokens that an episode may have after its prompt: L_max of length rules and normalisation."""
        return self.max_model_len - self.data.max_prompt_tokens


def _parts_of_batches(flat: dict[str, Any]) -> dict[str, int]:
    """Return -imbs and -tMbs where only -ibs or -tbs is given: the largest divisor up to the default."""
    parts = dict[str, int]()
    for whole, part in _PARTS.items():
        with suppress(TypeError, ValueError):  # a mistake that the field's own check explains
            size = int(flat[whole]) if whole in flat and part not in flat else 0
            most = min(size, ParallelConfig.model_fields[part].default)
            parts |= (
                {part: next(part_size for part_size in range(most, 0, -1) if size % part_size == 0)} if most > 0 else {}
            )
    return parts
