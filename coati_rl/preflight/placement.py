"""Assign actors to nodes from the nodes' free resources; `placement_manager` asks Ray for them.

A producer is never split: the ranks of its engine are on one node. The trainers of one tp * pp group are on one node
where possible, and all trainers of a node have consecutive ranks. A scorer or a reward model goes where room is
left, on the node with the least of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coati_rl.config.training import TrainingConfig
from coati_rl.types import Device


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Describe the actors to be placed."""

    num_trainers: int
    group_size: int  # trainers that should share a node: tp * pp * cp
    trainer: ActorResources
    num_producers: int
    producer: ActorResources
    num_reward_models: int = 0  # copies of all reward models
    reward_model: ActorResources = field(default_factory=lambda: ActorResources(cpus=1, gpus=0))
    num_scorers: int = 0  # copies of reference and teacher with devices of their own
    scorer: ActorResources = field(default_factory=lambda: ActorResources(cpus=1, gpus=0))

    @staticmethod
    def of(config: TrainingConfig, device: Device) -> "Request":
        """Return the actors that need a place of their own; engines that take turns have that of trainers.

        A tensor-parallel engine has a process, and so a CPU, for each rank.
        """
        width = config.producer_width
        on_gpu = device == "cuda"
        return Request(
            num_trainers=config.parallel.num_trainers,
            group_size=config.parallel.ranks_per_group,
            trainer=ActorResources(cpus=1, gpus=1 if on_gpu else 0),
            num_producers=0 if config.takes_turns else config.num_producers,
            producer=ActorResources(
                cpus=1 if on_gpu else width, gpus=width if on_gpu and not config.engine_urls else 0
            ),
            num_reward_models=config.reward_models.num_actors,
            reward_model=ActorResources(cpus=1, gpus=1 if on_gpu and config.reward_models.num_gpus else 0),
            num_scorers=config.parallel.ref_devices,
            scorer=ActorResources(cpus=1, gpus=1 if on_gpu else 0),
        )

    def __str__(self) -> str:
        parts = [f"{self.num_trainers} trainer(s) of {self.trainer}"] if self.num_trainers else []
        parts += [f"{self.num_producers} producer(s) of {self.producer} on one node"] if self.num_producers else []
        parts += [f"{self.num_reward_models} reward model(s) of {self.reward_model}"] if self.num_reward_models else []
        parts += [f"{self.num_scorers} scorer(s) of {self.scorer}"] if self.num_scorers else []
        return " and ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAssignment:
    """Hold node ids by trainer rank, by producer, by reward model and by scorer."""

    trainers: tuple[str, ...]
    producers: tuple[str, ...]
    reward_models: tuple[str, ...] = ()
    scorers: tuple[str, ...] = ()

    def fills(self, request: Request) -> bool:
        """Return True if every requested actor has a node."""
        wanted = (request.num_trainers, request.num_producers, request.num_reward_models, request.num_scorers)
        return tuple(map(len, (self.trainers, self.producers, self.reward_models, self.scorers))) == wanted


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
        if assignment.fills(request):
            return assignment
    return None


def explain(nodes: Sequence[ClusterNode], totals: Sequence[ClusterNode], request: Request) -> str:
    """Return why `assign_nodes` failed: what was requested, what does not fit, and what each node has."""
    assignment = _try(nodes, request, trainers_first=False, group_size=1)
    missing = {
        "producer(s)": request.num_producers - len(assignment.producers),
        "trainer(s)": request.num_trainers - len(assignment.trainers),
        "reward model(s)": request.num_reward_models - len(assignment.reward_models),
        "scorer(s)": request.num_scorers - len(assignment.scorers),
    }
    lacking = " and ".join(f"{count} {who}" for who, count in missing.items() if count)
    total_of = {node.node_id: node for node in totals}
    free = "; ".join(_describe(node, total_of[node.node_id]) for node in nodes) or "no node answers"
    return f"requested {request}; no resources for {lacking}; free: {free}"


def _describe(node: ClusterNode, total: ClusterNode) -> str:
    return f"{node.address} {node.cpus:g} of {total.cpus:g} CPUs, {node.gpus:g} of {total.gpus:g} GPUs"


def _try(nodes: Sequence[ClusterNode], request: Request, *, trainers_first: bool, group_size: int) -> NodeAssignment:
    """Assign as many actors as fit."""
    nodes_left = list(nodes)
    trainers: list[str] = []
    if trainers_first:
        trainers = _place_trainers(nodes_left, request, group_size)
    producers: list[str] = []
    for _ in range(request.num_producers):
        fitting = [node for node in nodes_left if node.capacity(request.producer) > 0]
        if not fitting:
            break
        choose: Any = max if trainers_first else min  # spread, or pack and leave resources for the trainers
        chosen: ClusterNode = choose(fitting, key=lambda node: node.capacity(request.producer))
        producers.append(chosen.node_id)
        nodes_left[nodes_left.index(chosen)] = chosen.without(request.producer)
    if not trainers_first:
        trainers = _place_trainers(nodes_left, request, group_size)
    return NodeAssignment(
        trainers=tuple(trainers),
        producers=tuple(producers),
        scorers=_place_one_by_one(nodes_left, request.scorer, request.num_scorers),
        reward_models=_place_one_by_one(nodes_left, request.reward_model, request.num_reward_models),
    )


def _place_one_by_one(nodes_left: list[ClusterNode], need: ActorResources, count: int) -> tuple[str, ...]:
    """Place as many such actors as fit, each where the least room is left."""
    placed: list[str] = []
    for _ in range(count):
        fitting = [node for node in nodes_left if node.capacity(need) > 0]
        if not fitting:
            break
        chosen = min(fitting, key=lambda node: node.capacity(need))
        placed.append(chosen.node_id)
        nodes_left[nodes_left.index(chosen)] = chosen.without(need)
    return tuple(placed)


def _place_trainers(nodes_left: list[ClusterNode], request: Request, group_size: int) -> list[str]:
    """Place whole groups: on the smallest node that holds all that are left, else as many as fit on the largest."""
    group = ActorResources(cpus=group_size * request.trainer.cpus, gpus=group_size * request.trainer.gpus)
    left, trainers = request.num_trainers // group_size, list[str]()
    while left and nodes_left:
        enough = [node for node in nodes_left if node.capacity(group) >= left]
        if enough:
            chosen = min(enough, key=lambda node: node.capacity(group))
        else:
            chosen = max(nodes_left, key=lambda node: node.capacity(group))
        count = min(left, chosen.capacity(group))
        if count == 0:
            break
        trainers += [chosen.node_id] * (count * group_size)
        nodes_left[nodes_left.index(chosen)] = chosen.without(group, count)
        left -= count
    return trainers
