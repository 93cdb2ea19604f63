"""Free room of each node -> the node of every trainer and producer. Arithmetic alone; Ray is asked elsewhere.

A producer is never split: the ranks of its engine are on one node. The trainers of one tp * pp group are on one node
where that can be, and ranks are contiguous: all of a node's trainers have consecutive numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coati_rl.config import Config
from coati_rl.types import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Describe what one actor asks of its node."""

    cpus: int
    gpus: int

    def __str__(self) -> str:
        return " and ".join(
            f"{count} {unit}{'s' if count > 1 else ''}"
            for count, unit in ((self.cpus, "CPU"), (self.gpus, "GPU"))
            if count
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node, and what is free there."""

    node_id: str
    address: str
    cpus: float
    gpus: float

    def capacity(self, need: Need) -> int:
        """Return how many such actors it has room for."""
        shares = [free // wanted for free, wanted in ((self.cpus, need.cpus), (self.gpus, need.gpus)) if wanted]
        return int(min(shares))

    def without(self, need: Need, count: int = 1) -> "Node":
        """The node when so many such actors are on it."""
        return replace(self, cpus=self.cpus - count * need.cpus, gpus=self.gpus - count * need.gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The actors that ask for a place."""

    num_trainers: int
    group_size: int  # trainers that should share a node: tp * pp
    trainer: Need
    num_producers: int
    producer: Need

    @staticmethod
    def of(config: Config, device: Device) -> "Request":
        """Everything that a run starts. A tensor-parallel engine has a process, and so a CPU, for each rank."""
        width = config.parallel.producer_tensor_parallel_size
        on_gpu = device == "cuda"
        return Request(
            num_trainers=config.parallel.num_trainers,
            group_size=config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size,
            trainer=Need(cpus=1, gpus=1 if on_gpu else 0),
            num_producers=config.parallel.num_inferencer,
            producer=Need(cpus=1 if on_gpu else width, gpus=width if on_gpu else 0),
        )

    def __str__(self) -> str:
        parts = [f"{self.num_trainers} trainer(s) of {self.trainer}"] if self.num_trainers else []
        return " and ".join([*parts, f"{self.num_producers} producer(s) of {self.producer} on one node"])


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAssignment:
    """Node ids, by trainer rank and by producer."""

    trainers: tuple[str, ...]
    producers: tuple[str, ...]


def assign_nodes(nodes: Sequence[Node], request: Request) -> NodeAssignment | None:
    """A node for everyone; None if there is no room.

    Trainers go to as few nodes as they can and leave the rest to producers, which spread. Where that leaves no node
    wide enough for a producer, producers choose first and pack, and at last trainer groups are split as well.

    Args:
        nodes: with their free room; the first of equals is preferred.
        request: who asks.
    """
    size = request.group_size
    for trainers_first, group_size in ((True, size), (False, size), (False, 1)):
        places = _try(nodes, request, trainers_first=trainers_first, group_size=group_size)
        if len(places.trainers) == request.num_trainers and len(places.producers) == request.num_producers:
            return places
    return None


def explain(nodes: Sequence[Node], totals: Sequence[Node], request: Request) -> str:
    """Why `assign_nodes` found none: what was asked for, what is missing, and what each node has."""
    places = _try(nodes, request, trainers_first=False, group_size=1)
    missing = {
        "producer(s)": request.num_producers - len(places.producers),
        "trainer(s)": request.num_trainers - len(places.trainers),
    }
    lacking = " and ".join(f"{count} {who}" for who, count in missing.items() if count)
    total_of = {node.node_id: node for node in totals}
    rooms = "; ".join(_room(node, total_of[node.node_id]) for node in nodes) or "no node answers"
    return f"asked for {request}; no room for {lacking}; free: {rooms}"


def _room(node: Node, total: Node) -> str:
    return f"{node.address} {node.cpus:g} of {total.cpus:g} CPUs, {node.gpus:g} of {total.gpus:g} GPUs"


def _try(nodes: Sequence[Node], request: Request, *, trainers_first: bool, group_size: int) -> NodeAssignment:
    """As many as find room."""
    rooms = list(nodes)
    trainers: list[str] = []
    if trainers_first:
        trainers = _place_trainers(rooms, request, group_size)
    producers: list[str] = []
    for _ in range(request.num_producers):
        fitting = [node for node in rooms if node.capacity(request.producer) > 0]
        if not fitting:
            break
        choose: Any = max if trainers_first else min  # spread, or pack and leave room for the trainers to come
        chosen: Node = choose(fitting, key=lambda node: node.capacity(request.producer))
        producers.append(chosen.node_id)
        rooms[rooms.index(chosen)] = chosen.without(request.producer)
    if not trainers_first:
        trainers = _place_trainers(rooms, request, group_size)
    return NodeAssignment(trainers=tuple(trainers), producers=tuple(producers))


def _place_trainers(rooms: list[Node], request: Request, group_size: int) -> list[str]:
    """Whole groups: the tightest node that holds all that are left, else as many as go on the roomiest one."""
    group = Need(cpus=group_size * request.trainer.cpus, gpus=group_size * request.trainer.gpus)
    left, trainers = request.num_trainers // group_size, list[str]()
    while left and rooms:
        enough = [node for node in rooms if node.capacity(group) >= left]
        if enough:
            chosen = min(enough, key=lambda node: node.capacity(group))
        else:
            chosen = max(rooms, key=lambda node: node.capacity(group))
        count = min(left, chosen.capacity(group))
        if count == 0:
            break
        trainers += [chosen.node_id] * (count * group_size)
        rooms[rooms.index(chosen)] = chosen.without(group, count)
        left -= count
    return trainers
