"""Derive the small configuration that is rehearsed from a user's: fewer ranks, prompts and tokens, the same arithmetic.

tp, pp and the kinds of everything stay; data-parallel ranks, producers and batches become few, in numbers that obey the
same rules, with several mini-batches, or steps between syncs, where the user has several. What a CPU lacks is left out.
Each reduction that would break a rule of the configuration is left out as well, so that a rehearsal is never refused
for its own sizes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, Generic, TypeVar

from coati_rl.config import Config
from coati_rl.config.training import TrainingConfig
from coati_rl.reward_spec import is_model, parse_reward_type

Job = TypeVar("Job", bound=TrainingConfig)

MAX_RANKS = 4  # trainers at most: each takes ten seconds of a core to start
_IN_A_GROUP = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")  # of the same samples
_MAX_COPIES = 2  # of data-parallel ranks, producers, and scorers
_PASSES = 16  # over the data at least, so that a file of a few rows fills all steps
_SIZES = {
    "max_new_tokens": 24,
    "num_generations": 4,
    "eval_samples": 2,
    "max_turns": 4,
    "agent_processes": 4,
    "reward_workers": 2,
    "ref_devices": 1,
}
_FAILURE_RATE = 0.5  # of the few samples of a step; one that fails by chance is a warning
_MODELS = ("model", "teacher", "critic_model", "reference_model")
# Fields whose value a CPU cannot show -> the value in its place.
_ON_GPUS: dict[str, Any] = {"quantization": None, "engine_arg": [], "compile_ops": None, "gpu_memory_utilization": 0.85}
_TRANSPORTS_OF_GPUS = ("nccl", "ipc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced(Generic[Job]):
    """Hold the configuration that is rehearsed."""

    config: Job
    num_steps: int  # optimizer steps of the rehearsal
    first_save: int  # the step of its first checkpoint
    notes: tuple[str, ...]  # what is rehearsed in another way than asked, one line each


def reduced(
    config: Job,
    *,
    precision: str,
    run_dir: str,
    models: Mapping[str, str],
    evaluation: Mapping[str, str] | None,
    max_rows: int | None,
    is_valid: Callable[[Job], bool],
) -> Reduced[Job]:
    """Return the configuration of the rehearsal.

    Args:
        config: as it was prepared: its models are directories.
        precision: fp32 or bf16, that of the plan.
        run_dir: of the rehearsal.
        models: directory of a model -> that of the small one in its place.
        evaluation: files with the first rows of each evaluation set, by its name; None: there is none.
        max_rows: training rows of each file that are read; None: all.
        is_valid: whether a configuration passes all rules.
    """
    flat = config.flat()
    config = config.with_changes(**_of_scratch(config, flat, precision, run_dir, models), **_without_gpus(flat))
    if evaluation:
        config = config.with_changes(eval_dataset=dict(evaluation), eval_interval=1)
    elif "eval_interval" in flat:
        config = config.with_changes(eval_interval=-1)
    notes = [*_left_out(flat)]
    for changes in _reductions(config, max_rows):
        candidate = config.with_changes(**changes)
        if is_valid(candidate):
            config = candidate
    notes += _layout_notes(flat, config.flat())
    period = config.sync_period if isinstance(config, Config) else 1
    config = config.with_changes(max_steps=2 * period)
    return Reduced(config=config, num_steps=2 * period, first_save=period, notes=tuple(notes))


def _of_scratch(
    config: TrainingConfig, flat: Mapping[str, Any], precision: str, run_dir: str, models: Mapping[str, str]
) -> dict[str, Any]:
    """Return the changes that keep a rehearsal on this machine, in its own directory, with its own models."""
    changes: dict[str, Any] = {
        "device": "cpu",
        "master_address": None,
        "master_port": 0,
        "ray_dir": None,
        "run_dir": run_dir,
        "checkpoint_path": None,
        "save_dir": None,
        "eval_save_dir": None,
        "save_interval": 1,
        "keep_checkpoints": None,
        "save_on_interrupt": False,
        "interrupt_grace_s": 5.0,
        "wandb": False,
        "enable_profiling": False,
        "precision": precision,
        "adapter": None,  # its rank, scale and layers are the config's
        **{name: models[flat[name]] for name in _MODELS if flat.get(name) in models},
    }
    if isinstance(config, Config):
        changes |= {"rollout_save_dir": None, "reward_type": with_models(config.reward.reward_type, models)}
        changes["max_failure_rate"] = max(config.run.max_failure_rate, _FAILURE_RATE)
        if config.data.tasks is not None:
            changes["tasks"] = {
                name: task
                if task.reward_type is None
                else task.model_copy(update={"reward_type": with_models(task.reward_type, models)})
                for name, task in config.data.tasks.items()
            }
        if config.sync.weight_transport in _TRANSPORTS_OF_GPUS:
            changes["weight_transport"] = "auto"
    return changes


def with_models(reward_type: str, models: Mapping[str, str]) -> str:
    """Return the text of -rt with other directories of its reward models."""
    for part in parse_reward_type(reward_type):
        directory = part.name.partition(":")[2]
        if is_model(part.name) and directory in models:
            reward_type = reward_type.replace(part.name, f"model:{models[directory]}")
    return reward_type


def _without_gpus(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in _ON_GPUS.items() if name in flat}


def _left_out(flat: Mapping[str, Any]) -> Iterator[str]:
    """Yield what only GPUs, or other machines, can show."""
    flags = {"quantization": "--quantization", "engine_arg": "--engine-arg"}
    for name, flag in flags.items():
        if flat.get(name):
            yield f"{flag} is not rehearsed: engines of the CPU may lack it"
    if flat.get("weight_transport") in _TRANSPORTS_OF_GPUS:
        yield f"--weight-transport {flat['weight_transport']} is not rehearsed: weights go by the CPU's own"
    if flat.get("checkpoint_path"):
        yield "-cp: the checkpoint was opened and compared; the small model begins anew"
    if flat.get("wandb"):
        yield "--wandb is not rehearsed: nothing is sent"


def _layout_notes(asked: Mapping[str, Any], small: Mapping[str, Any]) -> Iterator[str]:
    """Yield the layouts whose ranks are fewer than asked in another dimension than the data-parallel one."""
    flags = {
        "tensor_parallel_size": "-tp",
        "pipeline_parallel_size": "-pp",
        "context_parallel_size": "--context-parallel",
        "fsdp_size": "--fsdp-size",
        "expert_parallel_size": "--expert-parallel",
        "producer_tensor_parallel_size": "-ptp",
    }
    for name, flag in flags.items():
        if name in asked and asked[name] != small[name]:
            yield f"{flag} {asked[name]} is rehearsed as {flag} {small[name]}; the real sizes were checked with it"


def _reductions(config: TrainingConfig, max_rows: int | None) -> Iterator[dict[str, Any]]:
    """Yield changes, each to be taken alone if it breaks no rule; the first ones matter most."""
    flat = config.flat()
    layout = smaller_layout(config)
    if isinstance(config, Config):
        # Random weights answer all prompts equally wrong, and seldom end: filters would leave no sample to train.
        yield {"filter_range": None, "dynamic_batching": False, "filter_truncated_response": False}
        has_parts = config.parallel.train_batch_size > config.parallel.train_minibatch_size
        # The last that breaks no rule counts: the fewest prompts, in several mini-batches where the user has them.
        for parts, factor in ((1, 4), (1, 2), (1, 1), *([(2, 1)] if has_parts else [])):
            yield layout | smaller_batches(config, layout, parts=parts, factor=factor)
        yield {"num_episodes": max(_PASSES, flat["num_episodes"])}
    else:
        yield layout | {"train_batch_size": min(2, flat["train_batch_size"])}
        yield {"max_epochs": max(_PASSES, flat["max_epochs"])}
    for name, most in _SIZES.items():
        if isinstance(flat.get(name), int) and flat[name] > most:
            yield {name: most}
    if max_rows is not None:
        yield {"max_samples": min(max_rows, flat["max_samples"] or max_rows)}


def smaller_layout(config: TrainingConfig) -> dict[str, int]:
    """Return the numbers of trainers and producers, and of the ranks of each."""
    parallel = config.parallel
    inside = {name: getattr(parallel, name) for name in _IN_A_GROUP}
    while prod(inside.values()) > MAX_RANKS:
        largest = max(inside, key=lambda name: inside[name])  # the first of equal ones
        inside[largest] = _half(inside[largest])
    group = prod(inside.values())
    dp = min(config.dp, _MAX_COPIES, max(1, MAX_RANKS // group))
    sizes = {"num_trainers": group * dp, **inside}
    if parallel.fsdp_size:
        sizes["fsdp_size"] = gcd(parallel.fsdp_size, dp * inside["context_parallel_size"])
    sizes["expert_parallel_size"] = gcd(parallel.expert_parallel_size, sizes.get("fsdp_size", group * dp))
    if isinstance(config, Config):
        width = min(config.producer_width, _MAX_COPIES)
        engines = min(config.num_producers, 1 if width > 1 else _MAX_COPIES)
        if config.takes_turns:
            engines = max(1, min(engines, group * dp // width))
        sizes |= {"num_inferencer": engines, "producer_tensor_parallel_size": width}
    return sizes


def smaller_batches(config: Config, layout: Mapping[str, int], *, parts: int, factor: int = 1) -> dict[str, int]:
    """Return batch sizes of the fewest prompts with the same relations.

    Args:
        config: of the run.
        layout: of `smaller_layout`.
        parts: mini-batches of an optimizer step.
        factor: prompts of each at least.
    """
    parallel = config.parallel
    period = min(2, config.prompts_per_rollout // config.prompts_per_step)  # 2: some step has no sync after it
    dp = layout["num_trainers"] // prod(layout[name] for name in _IN_A_GROUP)
    producers = layout["num_inferencer"]
    least = parts * factor
    step = next(size for size in range(least, least * producers + 1, least) if size * dp * period % producers == 0)
    rollout = step * dp * period // producers
    in_flight = rollout
    if parallel.inference_microbatch_size < parallel.inference_batch_size:
        in_flight = next(size for size in range(max(1, rollout // 2), 0, -1) if rollout % size == 0)
    samples = step // parts * min(config.sampling.num_generations, _SIZES["num_generations"])
    return {
        "train_batch_size": step,
        "train_minibatch_size": step // parts,
        "train_microbatch_size": min(parallel.train_microbatch_size, samples),
        "inference_batch_size": rollout,
        "inference_microbatch_size": in_flight,
    }


def _half(number: int) -> int:
    """Return the largest proper divisor."""
    return next(size for size in range(number // 2, 0, -1) if number % size == 0)
