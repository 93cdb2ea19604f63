"""Ask the nodes of a cluster for their GPUs, and compare a run's forecast with them before its actors start.

The driver's machine need not have the cluster's GPUs, so that a plan without the cluster cannot know their memory.
"""

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coati_rl.errors import ConfigError
from coati_rl.memory.forecast import gib
from coati_rl.processes.nvml import open_gpus
from coati_rl.runtime.waits import ready

logger = logging.getLogger(__name__)

_ANSWER_S = 60.0  # for a worker to start on a node and answer
_NAME_BYTES = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGpus:
    """Hold the GPUs of a node."""

    count: int
    num_bytes: int  # of the one with the least memory
    name: str

    def __str__(self) -> str:
        return f"{self.count} x {self.name} with {gib(self.num_bytes)}"


def check_node_gpus(
    check: Callable[[int], object],
    nodes: Mapping[str, str],
    *,
    ask: Callable[[Sequence[str]], Sequence[NodeGpus | None]] | None = None,
) -> None:
    """Compare a run's forecast with the smallest GPU of its nodes.

    Args:
        check: raises ConfigError if the run does not fit GPUs of so many bytes.
        nodes: addresses by the ids of the nodes on which the run has reservations.
        ask: returns the GPUs of nodes; None: asks Ray's nodes.
    Raises: ConfigError, with what each node has.
    """
    found = dict(zip(nodes.values(), (ask or ask_nodes)([*nodes]), strict=True))
    known = {address: gpus for address, gpus in found.items() if gpus is not None}
    for address in (address for address, gpus in found.items() if gpus is None):
        logger.warning("the GPUs of the node at %s are unknown: the run's memory is not compared with theirs", address)
    if not known:
        return
    try:
        check(min(gpus.num_bytes for gpus in known.values()))
    except ConfigError as error:
        nodes_have = "; ".join(f"{address} {gpus}" for address, gpus in sorted(known.items()))
        raise ConfigError(f"{error} (the cluster: {nodes_have})") from error


def ask_nodes(node_ids: Sequence[str]) -> list[NodeGpus | None]:
    """Return the GPUs of nodes, by a task on each; None for one that has none, or does not answer."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(read_gpus)
    references = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()
        for node_id in node_ids
    ]
    answered = ready(references, timeout_s=_ANSWER_S)
    for reference in references:
        if reference not in answered:
            ray.cancel(reference, force=True)
    return [_result(reference) if reference in answered else None for reference in references]


def _result(reference: Any) -> NodeGpus | None:
    try:
        found: NodeGpus | None = ray.get(reference)
    except ray.exceptions.RayError as error:
        logger.warning("a node did not say which GPUs it has: %s", error)
        return None
    return found


def read_gpus(load: Callable[[str], Any] = ctypes.CDLL) -> NodeGpus | None:
    """Return this machine's GPUs, read from NVIDIA's driver: Ray hides them from a task that asks for none.

    None if there is no driver, or no GPU.
    """
    sizes, names = [], []
    nvml, devices = open_gpus(load)
    for device in devices:
        memory, name = (ctypes.c_ulonglong * 3)(), ctypes.create_string_buffer(_NAME_BYTES)
        is_known = not (
            nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
            or nvml.nvmlDeviceGetName(device, name, _NAME_BYTES)
        )
        if is_known:
            sizes.append(int(memory[0]))  # total, free, used
            names.append(name.value.decode(errors="replace"))
    if not sizes:
        return None
    smallest = sizes.index(min(sizes))
    return NodeGpus(count=len(sizes), num_bytes=sizes[smallest], name=names[smallest])
