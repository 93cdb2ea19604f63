"""List the layouts that a job's trainers can have, the fastest first, as changes of settings.

The order is by what ranks send each other. ZeRO 1 sums gradients once a step, as plain copies do, and each rank updates
its part alone. FSDP2 gathers and sums in every micro-batch, while it computes; where ranks share experts out it gathers
fewer. Ranks that share rows wait for each other's keys and values in every layer, tensor-parallel ones for more than
these, both within a node; pipeline stages wait for each other at both ends of a mini-batch. FSDP2 over tensor-parallel
ranks gathers in each micro-batch and sends in every layer, and comes last: it takes the least memory of weights.
Copies of FSDP2's shards take more than one, and are never chosen for memory.
"""

from collections.abc import Iterator
from typing import Any

from coati_rl.config.trainers import LAYOUT_FIELDS, TrainersConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.memory.nearest import Change
from coati_rl.plugins import is_plugin

PLAIN: dict[str, Any] = {name: TrainersConfig.model_fields[name].default for name in LAYOUT_FIELDS}
_FLAGS = dict(
    zip(
        LAYOUT_FIELDS,
        ("--plugin", "-tp", "-pp", "-zero", "--fsdp-size", "--context-parallel", "--expert-parallel"),
        strict=True,
    )
)
_SHARERS = (2, 4, 8, 16, 32, 64)  # trainers that share rows, within a node, or experts
_SHARED = ("context_parallel_size", "expert_parallel_size")  # rows or experts; given, they leave the rest open
_NODE = 8  # GPUs
_SPLITS = ((2, 1), (4, 1), (8, 1), (1, 2), (8, 2), (1, 4), (8, 4), (1, 8), (8, 8))  # tp, within a node, and pp


def is_layout_given(config: TrainingConfig) -> bool:
    """Whether the user has said anything of how trainers share matrices, layers and states out."""
    return not (PLAIN.keys() - _SHARED).isdisjoint(config.parallel.model_fields_set)


def plain_layout(config: TrainingConfig) -> dict[str, Any]:
    """Return the layout without shards and cuts, in which rows and experts are shared as the config says."""
    return {**PLAIN, **{name: getattr(config.parallel, name) for name in _SHARED}}


def layouts(config: TrainingConfig, *, is_bf16: bool) -> Iterator[Change]:
    """Yield the layouts of the config's trainers, each with the flags that differ from the config's own.

    Args:
        config: of the job; rules and the model may refuse some of its layouts.
        is_bf16: whether trainers compute in bfloat16 anyway, as ZeRO has them do. Without it layouts have none; nor
            with an optimizer of the user's own, whose parameters ZeRO would flatten.
    """
    trainers, cp, plain = config.parallel.num_trainers, config.parallel.context_parallel_size, plain_layout(config)
    zero = 1 if is_bf16 and not is_plugin(config.optimizer.optimizer) else 0
    found = [{**plain, "zero_stage": zero if trainers > 1 else 0}]
    if trainers > 1:
        found.append({**plain, "plugin": "fsdp2"})
    if config.parallel.expert_parallel_size == 1:
        found += [{**plain, "plugin": "fsdp2", "expert_parallel_size": n} for n in _SHARERS if trainers % n == 0]
    for size in (n for n in _SHARERS if cp == 1 and n <= _NODE and trainers % n == 0):
        found.append({**plain, "zero_stage": zero, "context_parallel_size": size})
        found.append({**plain, "plugin": "fsdp2", "context_parallel_size": size})
    for tp, pp in _SPLITS:
        if trainers % (tp * pp * cp) == 0:
            is_sharded = trainers > tp * pp
            sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "zero_stage": zero if is_sharded else 0}
            found.append({**plain, **sizes})
    found += [
        {**plain, "plugin": "fsdp2", "tensor_parallel_size": tp}
        for tp, pp in _SPLITS
        if pp == 1 and trainers % (tp * cp) == 0 and trainers > tp
    ]
    for values in found:
        yield layout_change(config, values)


def layout_change(config: TrainingConfig, values: dict[str, Any]) -> Change:
    """Return a layout with the flags that set it, where it differs from the config's own."""
    return Change(flags=layout_flags(values, config.flat()), values=values)


def layout_flags(values: dict[str, Any], others: dict[str, Any]) -> str:
    """Return the flags of a layout's settings that differ from another's."""
    return " ".join(f"{flag} {values[name]}" for name, flag in _FLAGS.items() if values[name] != others[name])
