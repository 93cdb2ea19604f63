"""Check the sizes of a run against what was found: GPUs, the positions of the model, usable prompts.

Messages name the nearest settings that fit.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from coati_rl.config import Config
from coati_rl.config.plan import Plan
from coati_rl.config.rules import named_length, nearest_flags, shorter
from coati_rl.errors import ConfigError
from coati_rl.preflight.resources import find_device, positions_of
from coati_rl.reading.dataset import PromptSet
from coati_rl.types import Device


def resolve_device(config: Config, *, is_dry_run: bool) -> tuple[Device, list[str]]:
    """Return the device, and warnings. Raises: ConfigError when this machine has too few GPUs."""
    parallel, reward_gpus = config.parallel, config.reward_models.num_gpus
    engines = f"{parallel.num_inferencer} * {parallel.producer_tensor_parallel_size}"
    terms = [("P * ptp", engines)] if _engines_have_gpus(config) else []
    terms += [("T", str(parallel.num_trainers)), *([("R", str(reward_gpus))] if reward_gpus else [])]
    terms += [("N", str(parallel.ref_devices))] if parallel.ref_devices else []
    names, numbers = (" + ".join(each) for each in zip(*terms, strict=True))
    needed = f"GPUs = {names}: {numbers} = {config.num_devices} are needed"
    return find_device(config, needed=needed, fewer=partial(_fewer, config), is_dry_run=is_dry_run)


def _engines_have_gpus(config: Config) -> bool:
    """Whether engines have GPUs beside those of the trainers."""
    return not (config.takes_turns or config.engine_urls)


def _fewer(config: Config, available: int) -> str:
    """Return what to give in place of a run's settings where so many GPUs are available."""
    parallel = config.parallel
    if parallel.ref_devices:
        return "use --ref-devices 0, with which the reference and the teacher lie on the trainers, or more GPUs"
    available -= config.reward_models.num_gpus
    without = "--reward-devices 0, " if config.reward_models.num_gpus else ""
    if available < 1:
        return f"use {without}--device cpu, or --master_address of a Ray cluster"
    has_gpus = _engines_have_gpus(config) and available > 1
    split, spare = parallel.ranks_per_group, available - has_gpus  # an engine needs one
    names = ["tensor_parallel_size", "pipeline_parallel_size"]
    names += ["context_parallel_size"] if parallel.context_parallel_size > 1 else []
    layout = dict.fromkeys(names, 1) if split > spare else {}
    split = 1 if layout else split
    wanted, room = parallel.producer_tensor_parallel_size, available - split if has_gpus else available // split * split
    width = wanted if wanted <= room else 1
    engines = parallel.num_inferencer if config.engine_urls else min(parallel.num_inferencer, room // width)
    trainers = min(parallel.num_trainers, available - has_gpus * engines * width) // split * split
    sizes = {"num_inferencer": engines, "num_trainers": trainers, "producer_tensor_parallel_size": width, **layout}
    flags = f"-t {trainers} -i {engines}" + (" -ptp 1" if width != wanted else "")
    flags += " -tp 1 -pp 1" if layout else ""
    flags += " --context-parallel 1" if "context_parallel_size" in layout else ""
    nearest = _with_others(flags, config, sizes)
    if has_gpus or not _engines_have_gpus(config):
        return f"nearest: {nearest}; or --master_address of a Ray cluster"
    return f"use {without}--colocate -nb 0 with {nearest}, --device cpu, or --master_address of a Ray cluster"


def check_length(config: Config, model: Any) -> None:
    """Raise ConfigError if the longest episode exceeds the positions of the model, given by its transformers config."""
    limit = positions_of(model)  # None where rotary positions are extended: the engine knows its limit
    if limit is not None and config.max_model_len > limit:
        raise ConfigError(
            f"{named_length(config)} tokens exceed the {limit} positions of --model {config.model.model}; "
            f"nearest: {shorter(config, limit)}"
        )


def check_prompts(config: Config, sets: Mapping[str, PromptSet]) -> None:
    """Raise ConfigError if a set of prompts, by its flag, has no usable one."""
    for flag, prompt_set in sets.items():
        if not prompt_set.prompts:
            raise ConfigError(
                f"{flag}: all {prompt_set.num_refused} prompts exceed "
                f"--max-prompt-tokens {config.data.max_prompt_tokens}"
            )


def check_step(config: Config, plan: Plan, num_prompts: int | None) -> None:
    """Raise ConfigError if the usable prompts do not fill one optimizer step. `num_prompts`: None if unknown."""
    if num_prompts is not None and plan.num_steps == 0:
        raise ConfigError(
            f"--dataset {config.data.dataset_text}: {num_prompts} usable prompts x {config.data.num_episodes} "
            f"episode(s) do not fill one optimizer step of tbs * dp = {config.prompts_per_step} prompts; "
            f"nearest: {_smaller_step(config, num_prompts)}"
        )


def _smaller_step(config: Config, num_prompts: int) -> str:
    """Return the flags with which so many prompts fill an optimizer step."""
    more_episodes = f"-e {-(-config.prompts_per_step // num_prompts)}"
    limit = num_prompts * config.data.num_episodes // config.dp
    if limit < 1:
        return more_episodes
    per_rollout = config.prompts_per_rollout // config.dp
    size = next(size for size in range(min(limit, per_rollout), 0, -1) if per_rollout % size == 0)
    return f"{more_episodes} or {_with_others(f'-tbs {size}', config, {'train_batch_size': size})}"


def _with_others(flags: str, config: Config, sizes: dict[str, int]) -> str:
    """Return `flags`, and the other flags that have to change with these sizes for the rules to hold."""
    return " ".join([flags, *nearest_flags(config.with_changes(**sizes))[:1]])
