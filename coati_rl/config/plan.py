"""Derive from a config the numbers a person checks before starting a long run (--dry-run prints them)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from coati_rl.algorithms.choices import TOKEN_FRACTIONS
from coati_rl.config.algorithm import AlgorithmConfig
from coati_rl.config.config import Config
from coati_rl.config.fields import shown
from coati_rl.config.trainers import PluginName
from coati_rl.config.training import TrainingConfig
from coati_rl.plugins import is_plugin
from coati_rl.types import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """Derived sizes of any training job."""

    num_devices: int  # GPUs when device is cuda, else processes
    device: Device
    precision: str
    dp: int
    plugin: PluginName
    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_parallel_size: int
    expert_parallel_size: int
    zero_stage: int
    fsdp_size: int
    num_steps: int | None
    memory: tuple[str, ...] = ()  # its forecast, one line a kind of process; empty without the model

    def lines(self) -> list[str]:
        """One line a number, for people."""
        return [
            f"{'devices':<24}{self.num_devices} ({self.device}, {self.precision})",
            f"{'data-parallel groups':<24}{self.dp}{self._inside_a_group()}",
            *self.memory,
        ]

    def _inside_a_group(self) -> str:
        parts = {
            "cp": self.context_parallel_size,
            "tp": self.tensor_parallel_size,
            "pp": self.pipeline_parallel_size,
            "ep": self.expert_parallel_size,
        }
        named = [f"{name} {size}" for name, size in parts.items() if size > 1]
        named += [f"ZeRO stage {self.zero_stage}"] if self.zero_stage else []
        named += [f"FSDP2{f' over {self.fsdp_size}' if self.fsdp_size else ''}"] if self.plugin == "fsdp2" else []
        return f" ({', '.join(named)})" if named else ""


def layout_sizes(config: TrainingConfig, device: Device) -> dict[str, Any]:
    """Return the fields of a plan that say how the model is trained on which devices."""
    parallel = config.parallel
    return {
        "num_devices": config.num_devices,
        "device": device,
        "precision": resolve_precision(config, device),
        "dp": config.dp,
        "plugin": parallel.plugin,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_parallel_size": parallel.expert_parallel_size,
        "zero_stage": parallel.zero_stage,
        "fsdp_size": parallel.fsdp_size,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(TrainingPlan):
    """Derived sizes of a run with producers."""

    prompts_per_step: int
    samples_per_step: int
    micro_batches_per_step: int  # per dp rank, if all samples are valid
    shared_prefix: str  # whether a prompt's samples share its tokens, and what that saves; empty for one sample each
    may_be_more: bool  # a token budget, or more pipeline stages, may ask for more micro-batches than that
    updates_per_batch: int
    sync_period: int  # optimizer steps between weight syncs (K)
    num_slots: int  # prompts in rollout or waiting, at most
    num_prompts: int | None  # drawn over all episodes; None: not read, or endless if the steps are known
    is_dynamic: bool  # groups may be replaced, so that the prompts fill fewer steps than that
    environment: str  # of episodes of several turns, and its limits; empty if there is none
    algorithm: str  # the preset, and the parts that a run's outcome hangs on

    def lines(self) -> list[str]:
        """One line a number, for people."""
        at_least = "at least " if self.may_be_more else ""
        at_most = "at most " if self.is_dynamic else ""
        unread = "unknown" if self.num_steps is None else "endless"
        return [
            *TrainingPlan.lines(self),
            f"{'prompts per step':<24}{self.prompts_per_step}",
            f"{'samples per step':<24}{self.samples_per_step}",
            f"{'micro-batches per step':<24}{at_least}{self.micro_batches_per_step} per dp rank",
            *([f"{'shared prefixes':<24}{self.shared_prefix}"] if self.shared_prefix else []),
            *([f"{'updates per batch':<24}{self.updates_per_batch}"] if self.updates_per_batch > 1 else []),
            f"{'sync period':<24}{self.sync_period} optimizer step(s)",
            f"{'rollout slots':<24}{self.num_slots} prompts",
            f"{'prompts':<24}{unread if self.num_prompts is None else self.num_prompts}",
            f"{'optimizer steps':<24}{'unknown' if self.num_steps is None else f'{at_most}{self.num_steps}'}",
            *([f"{'environment':<24}{self.environment}"] if self.environment else []),
            f"{'algorithm':<24}{self.algorithm}",
        ]


def make_plan(
    config: Config,
    *,
    num_prompts: int | None,
    device: Device,
    prompt_tokens: float | None = None,
    memory: tuple[str, ...] = (),
) -> Plan:
    """Derive the plan.

    Args:
        config: of the run.
        num_prompts: usable rows of the dataset; None if unknown.
        device: of the run.
        prompt_tokens: of a prompt, the mean; None if unknown.
        memory: lines of its forecast.
    """
    data, parallel = config.data, config.parallel
    drawn = None if num_prompts is None else num_prompts * data.num_episodes
    num_updates = config.algorithm.updates_per_batch
    steps = None if drawn is None else drawn // config.prompts_per_step * num_updates
    if data.max_steps is not None:
        steps = data.max_steps if steps is None else min(steps, data.max_steps)
    group, at_a_time = config.sampling.num_generations, parallel.train_microbatch_size
    if config.shares_prefixes:  # whole groups
        at_a_time = max(1, at_a_time // group) * group
    per_mini_batch = -(-parallel.train_minibatch_size * group // at_a_time)
    is_cut_for_stages = at_a_time > parallel.train_microbatch_size and per_mini_batch < parallel.pipeline_parallel_size
    is_cut_for_copies = config.shares_prefixes and group > 1 and config.dp > 1
    return Plan(
        **layout_sizes(config, device),
        memory=memory,
        prompts_per_step=config.prompts_per_step,
        samples_per_step=config.prompts_per_step * config.sampling.num_generations,
        micro_batches_per_step=per_mini_batch * parallel.train_batch_size // parallel.train_minibatch_size,
        shared_prefix=_shared_prefix(config, prompt_tokens),
        may_be_more=parallel.max_tokens_per_microbatch is not None or is_cut_for_stages or is_cut_for_copies,
        updates_per_batch=num_updates,
        sync_period=config.sync_period,
        num_slots=config.num_slots,
        num_prompts=drawn,
        num_steps=steps,
        is_dynamic=config.algorithm.dynamic_batching,
        environment=_environment(config),
        algorithm=_algorithm(config),
    )


def _shared_prefix(config: Config, prompt_tokens: float | None) -> str:
    """Say how many tokens fewer a group has with its prompt once, for responses of some lengths."""
    group, longest = config.sampling.num_generations, config.max_response_tokens
    if group == 1:
        return ""
    if not config.shares_prefixes:
        return f"off{': one sample per row' if config.parallel.one_sample_per_row else ''}"
    once = f"on: a prompt once for its {group} samples"
    if prompt_tokens is None:
        return once
    lengths = sorted({-(-longest // 16), -(-longest // 4), longest})
    times = [group * (prompt_tokens + length) / (prompt_tokens + group * length) for length in lengths]
    ratios, responses = (_listed(texts) for texts in ([f"{each:.1f}" for each in times], map(str, lengths)))
    return f"{once}; {ratios} times fewer tokens with {prompt_tokens:.0f} of a prompt and {responses} of a response"


def _listed(texts: Iterable[str]) -> str:
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def _environment(config: Config) -> str:
    """Name what answers the policy, and the limits of an episode."""
    environment = config.environment
    if not environment.is_given:
        return ""
    if environment.agent_command is not None:
        return (
            f"{environment.agent_command} (at most {environment.agent_processes} at a time, "
            f"{config.max_model_len} tokens, {environment.agent_timeout:g} s for an episode)"
        )
    if environment.has_tools:
        named = f"tools {', '.join((*environment.tools, *environment.mcp_server))} (format {environment.tool_format}"
    else:
        arguments = "".join(f" {each}" for each in environment.env_arg)
        named = f"{environment.env}{arguments} (in a {environment.env_isolation}"
    return (
        f"{named}; at most {environment.max_turns} turns, "
        f"{config.max_model_len} tokens, {environment.env_timeout:g} s for a call)"
    )


def _algorithm(config: Config) -> str:
    """The preset and what it comes to after the user's own flags."""
    algorithm = config.algorithm
    parts = [
        f"advantage {algorithm.advantage_estimator}{', whitened' if algorithm.whiten_advantages else ''}",
        algorithm.policy_loss if is_plugin(algorithm.policy_loss) else _clipping(algorithm),
        algorithm.loss_variation,
        _kl(config),
        f"old_logprobs of the {'trainer' if config.recomputes_old_logprobs else 'engine'}",
    ]
    distillation = config.distillation
    if distillation.teacher is not None:
        kl = f"{distillation.distill_coeff:g} x reverse KL to the teacher ({distillation.distill_kl})"
        parts.append(f"{kl}{', no reward' if distillation.distill_only else ''}")
    if config.algorithm.has_critic:
        critic = config.critic
        trace = f"by length, {critic.length_lambda:g}" if critic.length_lambda is not None else f"{critic.gae_lambda:g}"
        start = "--model" if critic.critic_model is None else critic.critic_model
        parts.append(f"critic from {start}, gamma {critic.gamma:g}, lambda {trace}")
    if algorithm.off_policy_correction != "none":
        parts.append(f"{algorithm.off_policy_correction} {algorithm.off_policy_low:g}/{algorithm.off_policy_high:g}")
    if algorithm.off_policy_mask_threshold is not None:
        parts.append(f"masked from {algorithm.off_policy_mask_threshold:g} nats")
    if algorithm.token_selection != "all":
        fraction = algorithm.token_fraction or TOKEN_FRACTIONS[algorithm.token_selection]
        parts.append(f"{algorithm.token_selection} of {fraction:g}")
    if config.control.entropy_target is not None:
        parts.append(f"entropy bonus towards {config.control.entropy_target:g} nats")
    elif algorithm.entropy_coeff:
        parts.append(f"entropy bonus {algorithm.entropy_coeff:g}")
    if algorithm.filter_range is not None:
        low, high = algorithm.filter_range
        parts.append(f"groups in {low:g}-{high:g}{', others replaced' if algorithm.dynamic_batching else ''}")
    if algorithm.filter_truncated_response:
        parts.append("truncated out")
    if config.over_length_cache is not None:
        parts.append(f"punished from {config.max_response_tokens - config.over_length_cache} tokens")
    return f"{algorithm.algo} ({', '.join(parts)})"


def _kl(config: Config) -> str:
    algorithm, control = config.algorithm, config.control
    if algorithm.kl_place == "none":
        return "no KL"
    weighed = " weighed by the ratio" if algorithm.kl_bias_correction else ""
    adapted = f" towards {control.kl_target:g} nats" if control.kl_controller == "adaptive" else ""
    moving = "" if control.reference_update is None else f", reference {control.reference_update}"
    place = f"{algorithm.kl_estimator} in the {algorithm.kl_place}"
    return f"KL {algorithm.kl_coeff:g}{adapted} {place}{weighed}{moving}"


def _clipping(algorithm: AlgorithmConfig) -> str:
    if algorithm.policy_loss == "sapo":
        gate = f"{algorithm.sapo_temperature_pos:g}/{algorithm.sapo_temperature_neg:g}"
        return f"sapo {gate} per {algorithm.ratio_level}"
    if algorithm.policy_loss == "vespo":
        return f"vespo {shown(algorithm.vespo_positive)}/{shown(algorithm.vespo_negative)} per sample"
    low, high, dual = algorithm.clip_eps_low, algorithm.clip_eps_high, algorithm.clip_dual
    bounds = f"{low:g}/{high:g}" + ("" if dual is None else f"/{dual:g}")
    return (
        f"{algorithm.policy_loss} {bounds} per {'sample' if algorithm.policy_loss == 'gmpo' else algorithm.ratio_level}"
    )


def resolve_dtype(config: TrainingConfig, device: Device) -> str:
    """The dtype, by its name in torch, in which engines load weights and trainers send them."""
    return "bfloat16" if resolve_precision(config, device) == "bf16" else "float32"


def resolve_precision(config: TrainingConfig, device: Device) -> str:
    """fp32 or bf16; bf16 by default on GPUs and under ZeRO, which keeps float32 masters of bfloat16 weights."""
    return config.model.precision or ("bf16" if device == "cuda" or config.parallel.zero_stage > 0 else "fp32")
