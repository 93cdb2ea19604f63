"""Derive from a config the numbers a person checks before starting a long run (--dry-run prints them)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coati_rl.algorithms.choices import TOKEN_FRACTIONS
from coati_rl.config.algorithm import AlgorithmConfig
from coati_rl.config.config import Config
from coati_rl.config.fields import shown
from coati_rl.config.training import TrainingConfig
from coati_rl.plugins import is_plugin
from coati_rl.types import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """Hold what is planned of any training job besides its settings."""

    config: TrainingConfig
    device: Device
    num_steps: int | None  # None: unknown
    memory: tuple[str, ...] = ()  # its forecast, one line a kind of process; empty without the model

    @property
    def num_devices(self) -> int:
        """GPUs when device is cuda, else processes."""
        return self.config.num_devices

    @property
    def precision(self) -> str:
        """fp32 or bf16."""
        return resolve_precision(self.config, self.device)

    def lines(self) -> list[str]:
        """One line a number, for people."""
        numbers = {
            "devices": f"{self.num_devices} ({self.device}, {self.precision})",
            "data-parallel groups": f"{self.config.dp}{_inside_a_group(self.config)}",
        }
        return [*plan_lines(numbers), *self.memory]


def plan_lines(numbers: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each number that a plan has; the others are empty."""
    return (f"{name:<24}{value}" for name, value in numbers.items() if value != "")


def _inside_a_group(config: TrainingConfig) -> str:
    """Name how the trainers of a data-parallel group share a model out."""
    parallel = config.parallel
    parts = {
        "cp": parallel.context_parallel_size,
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "ep": parallel.expert_parallel_size,
    }
    named = [f"{name} {size}" for name, size in parts.items() if size > 1]
    named += [f"ZeRO stage {parallel.zero_stage}"] if parallel.zero_stage else []
    over = f" over {parallel.fsdp_size}" if parallel.fsdp_size else ""
    named += [f"FSDP2{over}"] if parallel.plugin == "fsdp2" else []
    return f" ({', '.join(named)})" if named else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(TrainingPlan):
    """Hold what is planned of a run with producers."""

    config: Config
    num_prompts: int | None  # drawn over all episodes; None: not read, or endless if the steps are known
    prompt_tokens: float | None  # of a prompt, the mean; None if unknown

    def lines(self) -> list[str]:
        config, steps = self.config, self.num_steps
        num_updates = config.algorithm.updates_per_batch
        unread = "unknown" if steps is None else "endless"
        at_most = "at most " if config.algorithm.dynamic_batching else ""  # replaced groups take prompts
        numbers = {
            "prompts per step": config.prompts_per_step,
            "samples per step": config.prompts_per_step * config.sampling.num_generations,
            "micro-batches per step": _micro_batches(config),
            "shared prefixes": _shared_prefix(config, self.prompt_tokens),
            "updates per batch": num_updates if num_updates > 1 else "",
            "sync period": f"{config.sync_period} optimizer step(s)",
            "rollout slots": f"{config.num_slots} prompts",
            "prompts": unread if self.num_prompts is None else self.num_prompts,
            "optimizer steps": "unknown" if steps is None else f"{at_most}{steps}",
            "environment": _environment(config),
            "algorithm": _algorithm(config),
        }
        return [*TrainingPlan.lines(self), *plan_lines(numbers)]


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
    drawn = None if num_prompts is None else num_prompts * config.data.num_episodes
    filled = None if drawn is None else drawn // config.prompts_per_step * config.algorithm.updates_per_batch
    steps = min((each for each in (filled, config.data.max_steps) if each is not None), default=None)
    return Plan(
        config=config, device=device, num_steps=steps, memory=memory, num_prompts=drawn, prompt_tokens=prompt_tokens
    )


def _micro_batches(config: Config) -> str:
    """Name the micro-batches of a step, per dp rank, if all samples are valid.

    A token budget, whole groups and more pipeline stages may ask for more of them.
    """
    parallel, group, at_a_time = config.parallel, config.sampling.num_generations, config.parallel.train_microbatch_size
    if config.shares_prefixes:  # whole groups
        at_a_time = max(1, at_a_time // group) * group
    per_mini_batch = -(-parallel.train_minibatch_size * group // at_a_time)
    is_cut_for_stages = at_a_time > parallel.train_microbatch_size and per_mini_batch < parallel.pipeline_parallel_size
    is_cut_for_copies = config.shares_prefixes and group > 1 and config.dp > 1
    may_be_more = parallel.max_tokens_per_microbatch is not None or is_cut_for_stages or is_cut_for_copies
    number = per_mini_batch * parallel.train_batch_size // parallel.train_minibatch_size
    return f"{'at least ' if may_be_more else ''}{number} per dp rank"


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
