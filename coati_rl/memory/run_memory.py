"""Forecast the memory of a run's processes from its config and its models' transformers configs. Bytes throughout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coati_rl.config.config import Config
from coati_rl.config.held_models import offloaded, remote_models
from coati_rl.config.plan import resolve_precision
from coati_rl.config.training import TrainingConfig
from coati_rl.memory.activations import MicroBatchSize, head_bytes, item_bytes, layer_bytes
from coati_rl.memory.adapters import AdapterShape, adapter_shape, shares_base
from coati_rl.memory.context import context_share, gathered_key_bytes
from coati_rl.memory.distillation import teacher_loss_bytes
from coati_rl.memory.forecast import Forecast, ProcessMemory
from coati_rl.memory.model_shape import ModelShape, model_shape
from coati_rl.memory.trainer import (
    ADAM_MOMENTS,
    FrozenModel,
    Parts,
    TrainerLayout,
    offloaded_bytes,
    trained_bytes,
    trainer_parts,
)
from coati_rl.memory.updates import add_sent_weights, update_size
from coati_rl.plugins import is_plugin
from coati_rl.torchrun import is_one_machine
from coati_rl.transport.rendezvous import CollectiveBackend
from coati_rl.types import Device

# Private memory (RssAnon) of a run's actors, measured on Linux with torch for CPUs and a tiny model: trainers had 361
# to 364 MiB, producers with the fake engine 285 to 291. Without Ray those of bench/memory_forecast.py had 320 to 322.
TRAINER_LIBRARIES = 360 * 2**20
PYTHON_ENGINE_LIBRARIES = 285 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class RunModels:
    """Hold the transformers configs of the models that a trainer holds."""

    policy: Any
    frozen: Mapping[str, Any] = field(default_factory=dict)  # reference, old (the policy before the update), teacher
    has_scalar_head: bool = False
    critic: Any = None  # trained beside the policy; None: there is none
    adapter_copies: int = 0  # of the policy's adapters: the policy before the update, on the same base


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Hold what the forecast needs to know of the devices."""

    device: Device
    host_bytes: int  # in total, of which an engine's cache takes at most a part
    gpu_bytes: int | None = None  # of the smallest GPU; None: no GPU, or unknown


def rl_micro_batch(config: Config, *, prompt_tokens: int, response_tokens: int) -> tuple[MicroBatchSize, bool]:
    """Return a run's micro-batch at these lengths, and whether a step has several.

    Whole groups that share their prompt are not cut by -tmbs; the token budget cuts in any case.
    """
    parallel, group = config.parallel, config.sampling.num_generations
    samples = parallel.train_microbatch_size
    in_step = parallel.train_batch_size * group
    alone, behind = prompt_tokens + response_tokens, response_tokens
    if config.shares_prefixes and group > 1:
        samples = min(max(1, samples // group) * group, in_step)
        per_group = prompt_tokens + group * behind
        tokens, loss, path = (samples // group * each for each in (per_group, group * behind, group * alone))
        masked = behind * alone if behind < 4 * prompt_tokens else 0  # `consumer.models.packed_attention`
    else:
        tokens, loss, path, masked = samples * alone, samples * behind, 0, 0
    whole = MicroBatchSize(tokens=tokens, loss_tokens=loss, path_tokens=path, masked=masked, longest=alone)
    size, is_cut = _within(whole, parallel)
    return size, is_cut or in_step > samples


def offline_micro_batch(
    config: TrainingConfig, *, samples_at_a_time: int, samples_per_step: int, tokens: int, unit: int
) -> tuple[MicroBatchSize, bool]:
    """Return a micro-batch of samples of so many tokens each, all of them in the loss, and whether a step has several.

    Samples that are compared (`unit` of them) may share a prompt, whose keys and values are copied for each.
    """
    samples = min(samples_at_a_time, samples_per_step)
    whole = MicroBatchSize(
        tokens=samples * tokens,
        loss_tokens=samples * tokens,
        path_tokens=samples * tokens if config.shares_prefixes and unit > 1 else 0,
        longest=tokens,
    )
    size, is_cut = _within(whole, config.parallel)
    return size, is_cut or samples_per_step > samples


def _within(size: MicroBatchSize, parallel: Any) -> tuple[MicroBatchSize, bool]:
    """Return the size at most at the token budget, and whether it was cut."""
    budget = parallel.max_tokens_per_microbatch
    if budget is None or size.tokens <= budget:
        return size, False
    loss, path = (-(-each * budget // size.tokens) for each in (size.loss_tokens, size.path_tokens))
    return replace(size, tokens=budget, loss_tokens=loss, path_tokens=path), True


def trainer_memory(
    config: TrainingConfig,
    models: RunModels,
    size: MicroBatchSize,
    machine: Machine,
    *,
    has_several_micro_batches: bool,
    kept_versions: int = 0,
    backend: CollectiveBackend | None = None,
) -> ProcessMemory:
    """Return the memory of a run's trainer rank, the largest one.

    Args:
        config, models: of the run, and that it holds.
        size: of its largest micro-batch.
        machine: the devices.
        has_several_micro_batches: in a step.
        kept_versions: of its weights in host memory.
        backend: by which weights are sent to engines; None: nothing is sent.
    """
    tp, cp = config.parallel.tensor_parallel_size, config.parallel.context_parallel_size
    layout = _trainer_layout(config, machine.device, has_several_micro_batches=has_several_micro_batches)
    shape = model_shape(models.policy, tensor_parallel_size=tp, has_scalar_head=models.has_scalar_head)
    adapters = _adapters_of(config, models.policy, layout)
    layout = replace(layout, adapters=adapters, gathered_keys=gathered_key_bytes(shape, size, cp, machine.device))
    size = context_share(size, cp)
    frozen = _frozen_models(config, models, layout)
    held, away = (sum(each.num_bytes for each in frozen if each.is_away == is_away) for is_away in (False, True))
    parts = trainer_parts(shape, size, layout, scored=frozen)
    parts["frozen models"] = parts.get("frozen models", 0) + held + models.adapter_copies * parts["parameters"]
    of_teacher = teacher_loss_bytes(config, models.frozen.get("teacher"), size, layout.precision, machine.device)
    parts["teacher's loss"] = of_teacher
    elsewhere = away + (held if layout.takes_turns else 0) + offloaded_bytes(shape, size, layout)
    if models.critic is not None:  # its activations are there when the policy's are not
        critic = model_shape(models.critic, tensor_parallel_size=tp, has_scalar_head=True)
        of_critic = replace(layout, adapters=_adapters_of(config, models.critic, layout))
        parts["critic"] = trained_bytes(critic, size, of_critic)
        elsewhere += offloaded_bytes(critic, size, of_critic)
    host: Parts = {"libraries": TRAINER_LIBRARIES}
    if machine.device == "cuda":  # on the CPU it is in a file
        host["offloaded"] = elsewhere
    if kept_versions:  # on data-parallel rank 0, or with FSDP2 each rank its part; a mean over ranks
        host["kept weights"] = kept_versions * parts["parameters"] // (1 if layout.is_fully_sharded else config.dp)
    if backend is not None:
        add_sent_weights(parts, host, backend, layout, update_size(config, models.policy, layout.precision))
    if not shape.is_known:
        parts.pop("activations", None)
    shared = _shared_base(adapters, shape, item_bytes(layout.precision))
    return ProcessMemory(
        name="trainer",
        count=config.parallel.num_trainers,
        parts=parts,
        host=host,
        shared=shared,
        together=config.parallel.num_trainers if shared else 1,
        unknown="; ".join(_unknown_parts(shape, layout)),
    )


def _shared_base(adapters: AdapterShape | None, shape: ModelShape, e: int) -> Parts:
    return {"base": adapters.whole_weights(shape) * e} if adapters and adapters.is_base_shared else {}


def _frozen_models(config: TrainingConfig, models: RunModels, layout: TrainerLayout) -> list[FrozenModel]:
    """Return the frozen models on a rank."""
    shards, found = layout.dp if layout.is_fully_sharded else layout.pp, list[FrozenModel]()
    for role, hf_config in models.frozen.items():
        if role not in remote_models(config):
            shape = model_shape(hf_config, tensor_parallel_size=config.parallel.tensor_parallel_size)
            num_bytes = shape.num_weights * item_bytes(layout.precision) // shards
            found.append(FrozenModel(shape=shape, num_bytes=num_bytes, is_away=role in offloaded(config)))
    return found


def _unknown_parts(shape: ModelShape, layout: TrainerLayout) -> Iterator[str]:
    """Say what of a trainer's memory is not forecast, and why."""
    if not shape.is_known:
        yield f"activations unknown, as the architecture is {shape.model_type}"
    if not layout.adam_moments:
        yield "the optimizer's states unknown, as --optimizer is your own"


def _adapters_of(config: TrainingConfig, hf_config: Any, layout: TrainerLayout) -> AdapterShape | None:
    """Return the adapters of a trained model; None: its weights are trained."""
    if not config.lora.is_on:
        return None
    tp = config.parallel.tensor_parallel_size
    return adapter_shape(
        hf_config,
        config.lora.spec,
        tensor_parallel_size=tp,
        is_base_shared=tp == 1 and shares_base(hf_config, layout.precision, layout.device, layout.plugin),
        is_quantized=config.lora.load_in_4bit,
    )


def _trainer_layout(config: TrainingConfig, device: Device, *, has_several_micro_batches: bool) -> TrainerLayout:
    parallel = config.parallel
    return TrainerLayout(
        precision=resolve_precision(config, device),
        device=device,
        plugin=parallel.plugin,
        dp=config.fsdp_ranks,
        fsdp_copies=config.num_copies // config.fsdp_ranks,
        pp=parallel.pipeline_parallel_size,
        ep=parallel.expert_parallel_size,
        zero_stage=parallel.zero_stage if config.num_copies > 1 else 0,
        gradient_checkpointing=parallel.recomputes_activations,
        offloads_activations=parallel.offload_activations and device == "cuda",
        has_several_micro_batches=has_several_micro_batches,
        adam_moments=0 if is_plugin(config.optimizer.optimizer) else ADAM_MOMENTS,
        offloads_optimizer="optimizer" in offloaded(config),
        takes_turns=config.takes_turns,
    )


def reward_model_memory(config: Config, machine: Machine, hf_configs: Mapping[str, Any]) -> list[ProcessMemory]:
    """Return the memory of the copies of each reward model: its weights, in the run's precision.

    Args:
        config: of the run.
        machine: the devices.
        hf_configs: of the models that are known, by directory.
    """
    e, processes = item_bytes(resolve_precision(config, machine.device)), list[ProcessMemory]()
    for directory, hf_config in hf_configs.items():
        weights: Parts = {"parameters": model_shape(hf_config, has_scalar_head=True).num_weights * e}
        on_host = machine.device == "cuda" and not config.reward_models.num_gpus
        processes.append(
            ProcessMemory(
                name="reward model",
                count=len(config.reward_models.names[directory]),
                parts={} if on_host else weights,
                host={"libraries": PYTHON_ENGINE_LIBRARIES, **(weights if on_host else {})},
                unknown="in host memory, as --reward-devices is 0" if on_host else "",
            )
        )
    return processes


def scorer_memory(
    config: TrainingConfig, models: RunModels, size: MicroBatchSize, machine: Machine
) -> list[ProcessMemory]:
    """Return the memory of the copies of reference and teacher that have devices of their own; none without them."""
    shapes = [model_shape(each) for role, each in models.frozen.items() if role in remote_models(config)]
    if not shapes:
        return []
    precision, count = resolve_precision(config, machine.device), config.parallel.ref_devices
    parts = {
        "parameters": sum(shape.num_weights for shape in shapes) * item_bytes(precision),
        "activations": max(layer_bytes(shape, size, precision, machine.device) for shape in shapes),
        "LM head": max(head_bytes(shape, size, precision, machine.device, is_trained=False) for shape in shapes),
    }
    return [ProcessMemory(name="scorer", count=count, parts=parts, host={"libraries": TRAINER_LIBRARIES})]


def run_forecast(
    config: TrainingConfig, machine: Machine, processes: Sequence[ProcessMemory], *, shared: Parts | None = None
) -> Forecast:
    """Return the forecast of all processes; those of a cluster are on several hosts."""
    return Forecast(
        device=machine.device,
        processes=tuple(processes),
        shared=shared or {},
        is_one_host=not config.cluster.master_address and is_one_machine(),
        takes_turns=config.takes_turns,
    )
