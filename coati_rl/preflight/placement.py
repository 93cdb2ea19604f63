"""Assign actors to nodes from the nodes' free resources; `placement_manager` asks Ray for them.

A producer is never split: the ranks of its engine are on one node. The trainers of one tp * pp group are on one node
where possible, and all trainers of a node have consecutive ranks. A scorer or a reward model goes where room is
left, on the node with the least of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from coati_rl.config.training import TrainingConfig
from coati_rl.types import Device

Kind = Literal["trainer", "producer", "reward model", "scorer"]
NodeAssignment = Mapping[Kind, tuple[str, ...]]  # node ids; of trainers by rank


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorResources:
    """Hold the resources that one actor needs."""

    cpus: int
    gpus: float

    def __str__(self) -> str:
        return " and ".join(
            f"{count:g} {unit}{'s' if count > 1 else ''}"
            for count, unit in ((self.cpus, "CPU"), (self.gpus, "GPU"))
            if count
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNode:
    """Hold a node's resources."""

    node_id: str
    address: str
    cpus: float
    gpus: float

    def capacity(self, need: ActorResources) -> int:
        """Return the number of such actors that fit."""
        counts = [free // wanted for free, wanted in ((self.cpus, need.cpus), (self.gpus, need.gpus)) if wanted]
        return int(min(counts))

    def without(self, need: ActorResources, count: int = 1) -> "ClusterNode":
        """Return the node with the resources of so many such actors taken."""
        return replace(self, cpus=self.cpus - count * need.cpus, gpus=self.gpus - count * need.gpus)


class Actors(NamedTuple):
    """Say how many actors of a kind there are, and what each of them needs."""

    number: int
    each: ActorResources


_NONE = Actors(0, ActorResources(cpus=1, gpus=0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Describe the actors to be placed."""

    actors: Mapping[Kind, Actors]
    group_size: int = 1  # trainers that should share a node: tp * pp * cp

    @staticmethod
    def of(config: TrainingConfig, device: Device) -> "Request":
        """Return the actors that need a place of their own; engines that take turns have that of trainers.

        A tensor-parallel engine has a process, and so a CPU, for each rank.
        """
        width, on_gpu = config.producer_width, device == "cuda"
        one, without_gpu = ActorResources(cpus=1, gpus=1 if on_gpu else 0), ActorResources(cpus=1, gpus=0)
        engine = ActorResources(cpus=1 if on_gpu else width, gpus=width if on_gpu and not config.engine_urls else 0)
        rewards = config.reward_models
        return Request(
            actors={
                "trainer": Actors(config.parallel.num_trainers, one),
                "producer": Actors(0 if config.takes_turns else config.num_producers, engine),
                "reward model": Actors(rewards.num_actors, one if rewards.num_gpus else without_gpu),
                "scorer": Actors(config.parallel.ref_devices, one),
            },
            group_size=config.parallel.ranks_per_group,
        )

    @property
    def one_producer(self) -> "Request":
        """Return the request for one producer more."""
        return Request(actors={"producer": self.actors["producer"]._replace(number=1)})

    def __str__(self) -> str:
        return " and ".join(
            f"{count} {kind}(s) of {each}{' on one node' if kind == 'producer' else ''}"
            for kind, (count, each) in self.actors.items()
            if count
        )


def assign_nodes(nodes: Sequence[ClusterNode], request: Request) -> NodeAssignment | None:
    """Assign a node to every actor; None if they do not fit.

    Trainers are packed on as few nodes as possible, and producers spread over the rest. If no node is left with enough
    GPUs for a producer, producers are placed first and packed; at last trainer groups are split as well.

    Args:
        nodes: with their free resources; the first of equals is preferred.
        request: the actors to be placed.
    """
    size = request.group_size
    for trainers_first, group_size in ((True, size), (False, size), (False, 1)):
        assignment = _try(nodes, request, trainers_first=trainers_first, group_size=group_size)
        if not any(_missing(request, assignment).values()):
            return assignment
    return None


def explain(nodes: Sequence[ClusterNode], totals: Sequence[ClusterNode], request: Request) -> str:
    """Return why `assign_nodes` failed: what was requested, what does not fit, and what each node has."""
    assignment = _try(nodes, request, trainers_first=False, group_size=1)
    missing = _missing(request, assignment)
    lacking = " and ".join(f"{count} {kind}(s)" for kind, count in missing.items() if count)
    total_of = {node.node_id: node for node in totals}
    free = "; ".join(_describe(node, total_of[node.node_id]) for node in nodes) or "no node answers"
    return f"requested {request}; no resources for {lacking}; free: {free}"


def _describe(node: ClusterNode, total: ClusterNode) -> str:
    return f"{node.address} {node.cpus:g} of {total.cpus:g} CPUs, {node.gpus:g} of {total.gpus:g} GPUs"


def _missing(request: Request, assignment: NodeAssignment) -> dict[Kind, int]:
    return {kind: count - len(assignment[kind]) for kind, (count, _) in request.actors.items()}


def _try(nodes: Sequence[ClusterNode], request: Request, *, trainers_first: bool, group_size: int) -> NodeAssignment:
    """Assign as many actors as fit."""
    nodes_left, placed = list(nodes), dict[Kind, tuple[str, ...]]()
    of_services: tuple[Kind, ...] = ("trainer", "producer") if trainers_first else ("producer", "trainer")
    for kind in (*of_services, "scorer", "reward model"):
        count, need = request.actors.get(kind, _NONE)
        if kind == "trainer":
            placed[kind] = _place_trainers(nodes_left, need, count, group_size)
        else:  # producers spread, or leave resources for the trainers
            is_spread = kind == "producer" and trainers_first
            placed[kind] = _place_one_by_one(nodes_left, need, count, choose=max if is_spread else min)
    return placed


def _place_one_by_one(
    nodes_left: list[ClusterNode], need: ActorResources, count: int, *, choose: Any
) -> tuple[str, ...]:
    """Place as many such actors as fit, each where the least (min) or the most (max) room is left."""
    placed: list[str] = []
    for _ in range(count):
        fitting = [node for node in nodes_left if node.capacity(need) > 0]
        if not fitting:
            break
        chosen: ClusterNode = choose(fitting, key=lambda node: node.capacity(need))
        placed.append(chosen.node_id)
        nodes_left[nodes_left.index(chosen)] = chosen.without(need)
    return tuple(placed)


def _place_trainers(
    nodes_left: list[ClusterNode], need: ActorResources, count: int, group_size: int
) -> tuple[str, ...]:
    """Place whole groups: on the smallest node that holds all that are left, else as many as fit on the largest."""
    group = ActorResources(cpus=group_size * need.cpus, gpus=group_size * need.gpus)
    left, trainers = count // group_size, list[str]()
    while left and nodes_left:
        enough = [node for node in nodes_left if node.capacity(group) >= left]
        if enough:
            chosen = min(enough, key=lambda node: node.capacity(group))
        else:
            chosen = max(nodes_left, key=lambda node: node.capacity(group))
        fitting = min(left, chosen.capacity(group))
        if fitting == 0:
            break
        trainers += [chosen.node_id] * (fitting * group_size)
        nodes_left[nodes_left.index(chosen)] = chosen.without(group, fitting)
        left -= fitting
    return tuple(trainers)
