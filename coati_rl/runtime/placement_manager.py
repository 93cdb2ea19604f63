"""Reserve resources for the actors of a run in Ray placement groups.

Each trainer and producer gets a reservation, with its fraction of the node's cores. A producer's reservation is reused
by its replacement; if the node is lost, resources on another node are reserved. Each wait has a deadline.
"""

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError, RunError
from coati_rl.preflight.placement import (
    ActorResources,
    ClusterNode,
    Kind,
    NodeAssignment,
    Request,
    assign_nodes,
    explain,
)
from coati_rl.runtime.waits import result
from coati_rl.types import Device

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 60.0  # for other programs to release resources
REPLACEMENT_TIMEOUT_S = 20.0  # the same for a producer whose node was lost, while the run waits
RESERVATION_TIMEOUT_S = 20.0  # for Ray to reserve free resources
_ANSWER_S = 3.0  # for a raylet to accept a connection
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Hold the resources reserved for one actor."""

    need: ActorResources
    node_id: str
    address: str  # of the node
    group: Any  # Ray's placement group
    bundle: int  # in the group
    slot: int  # number of this actor among the run's actors on its node
    num_slots: int  # actors of the run on its node
    num_threads: int  # its part of the node's cores
    gpus: tuple[int, ...] = ()  # of the node, that it shares with trainers

    @property
    def strategy(self) -> Any:
        """Return the value of Ray's `scheduling_strategy`."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)


class PlacementManager:
    """Hold all reservations of a run."""

    def __init__(self, config: TrainingConfig, device: Device) -> None:
        """Reserve resources for all trainers, producers, scorers and reward models.

        Raises: ConfigError if the cluster is too small; RunError if other programs use it until the deadline.
        """
        self._request = Request.of(config, device)
        assignment = _wait_for_nodes(self._request, timeout_s=PLACEMENT_TIMEOUT_S)
        self._num_slots = Counter(node_id for node_ids in assignment.values() for node_id in node_ids)
        self._next_slot: Counter[str] = Counter()
        self._leaving: set[str] = set()  # nodes that are about to go; one that joins again has another id
        self._raylets: dict[str, tuple[str, int]] = {}  # node -> address and port, of nodes with a reservation
        self._free = [self._reserve("producer", [node_id])[0] for node_id in assignment["producer"]]
        self.trainers = self._reserve("trainer", assignment["trainer"])  # by rank
        if config.takes_turns:
            self._share(config)
        self.reward_models = self._reserve("reward model", assignment["reward model"])
        self.scorers = self._reserve("scorer", assignment["scorer"])

    def _share(self, config: TrainingConfig) -> None:
        """Give each engine the place and the GPUs of the trainers whose devices it has in its turn."""
        width = config.producer_width
        for producer in range(config.num_producers):
            own = self.trainers[producer * width : (producer + 1) * width]
            first = own[0]
            if any(each.node_id != first.node_id for each in own):
                raise ConfigError(
                    f"--colocate with -ptp {width}: engine {producer} would be on several nodes; use a smaller -ptp"
                )
            self._free.append(
                replace(
                    first,
                    need=ActorResources(cpus=0, gpus=0),  # Ray counts them for the trainers
                    gpus=tuple(map(_gpu_of, own)) if first.need.gpus else (),
                    slot=first.slot // width,
                    num_slots=max(1, first.num_slots // width),
                    num_threads=first.num_threads * width,
                )
            )

    @property
    def nodes(self) -> dict[str, str]:
        """Return the addresses of the nodes with a reservation, by id."""
        return {node_id: address for node_id, (address, _) in self._raylets.items()}

    def acquire(self) -> Reservation:
        """Return a free reservation for a producer, or a new one on another node if its node is lost.

        Raises: RunError if no other node has the resources.
        """
        reservation = self._free.pop(0)
        if _is_reachable(reservation.node_id):
            return reservation
        self._forget(reservation)
        try:
            (node_id,) = _wait_for_nodes(self._request.one_producer, timeout_s=REPLACEMENT_TIMEOUT_S)["producer"]
        except (ConfigError, RunError) as error:
            raise RunError(f"the node at {reservation.address} is lost, and a producer with it: {error}") from error
        self._num_slots[node_id] += 1
        return self._reserve("producer", [node_id])[0]

    def acquire_more(self) -> Reservation | None:
        """Return a reservation for one more producer, if a node has the resources now; None if none has."""
        while self._free:
            reservation = self._free.pop(0)
            if _is_reachable(reservation.node_id):
                return reservation
            self._forget(reservation)
        free = [node for node in cluster_nodes()[0] if node.node_id not in self._leaving]
        if (assignment := assign_nodes(free, self._request.one_producer)) is None:
            return None
        (node_id,) = assignment["producer"]
        self._num_slots[node_id] += 1
        try:
            return self._reserve("producer", [node_id])[0]
        except RunError as error:  # the node has left meanwhile
            logger.info("%s", error)
            return None

    def _forget(self, reservation: Reservation) -> None:
        """Drop a producer's reservation whose node is gone: the run goes on without it."""
        logger.info("the run goes on without the node at %s", reservation.address)
        self._raylets.pop(reservation.node_id, None)
        remove_placement_group(reservation.group)

    def release(self, reservation: Reservation, *, is_leaving: bool = False) -> None:
        """Release a producer's reservation for its replacement, or for none if the node is about to leave."""
        if is_leaving:
            self._leaving.add(reservation.node_id)
            self._forget(reservation)
        else:
            self._free.append(reservation)

    def dead_raylets(self) -> list[str]:
        """Return the addresses of nodes with a reservation whose raylet is dead; all actors there die with it."""
        return sorted(address for address, port in self._raylets.values() if not _accepts_connection(address, port))

    def _reserve(self, kind: Kind, node_ids: Sequence[str]) -> list[Reservation]:
        """Create one placement group for actors of a kind, each bundle on its node."""
        if not node_ids:
            return []
        need = self._request.actors[kind].each
        group: Any = placement_group(
            [{"CPU": need.cpus, **({"GPU": need.gpus} if need.gpus else {})}] * len(node_ids),
            strategy="PACK",
            bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in node_ids],
        )
        known = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in _ray_nodes()}
        self._raylets.update((node_id, known[node_id]) for node_id in node_ids if node_id in known)
        addresses = {node_id: address for node_id, (address, _) in known.items()}
        if not group.wait(RESERVATION_TIMEOUT_S):
            where = ", ".join(sorted({addresses.get(node_id, "a lost node") for node_id in node_ids}))
            raise RunError(
                f"Ray did not reserve {len(node_ids)} x {need} on {where} within {RESERVATION_TIMEOUT_S:g} s"
            )
        reservations = []
        for bundle, node_id in enumerate(node_ids):
            slot, num_slots = self._next_slot[node_id], self._num_slots[node_id]
            self._next_slot[node_id] += 1
            reservations.append(
                Reservation(
                    need=need,
                    node_id=node_id,
                    address=addresses[node_id],
                    group=group,
                    bundle=bundle,
                    slot=slot,
                    num_slots=num_slots,
                    num_threads=max(1, _num_cores(node_id) // num_slots),
                )
            )
        return reservations


def _gpu_of(trainer: Reservation) -> int:
    """Return the number of a trainer's GPU on its node, which is the same for all that run in this reservation."""

    def number() -> int:
        return int(ray.get_gpu_ids()[0])

    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 1, "scheduling_strategy": trainer.strategy, "max_retries": 0}
    task: Any = ray.remote(number)
    found: int = result(task.options(**options).remote(), timeout_s=RESERVATION_TIMEOUT_S)
    return found


def _wait_for_nodes(request: Request, *, timeout_s: float) -> NodeAssignment:
    """Assign nodes, waiting for resources that other programs use.

    Raises: ConfigError at once if the cluster is too small; RunError if they are not free at the deadline.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        free, totals = cluster_nodes()
        assignment = assign_nodes(free, request)
        if assignment is not None:
            return assignment
        if assign_nodes(totals, request) is None:
            raise ConfigError(
                f"the Ray cluster is too small: {explain(totals, totals, request)}; "
                f"lower {'-i, -ptp or -t' if request.actors['producer'].number else '-t'}, or add nodes"
            )
        if time.monotonic() > deadline:
            raise RunError(f"the Ray cluster stayed occupied for {timeout_s:g} s: {explain(free, totals, request)}")
        time.sleep(_POLL_S)


def cluster_nodes() -> tuple[list[ClusterNode], list[ClusterNode]]:
    """Return the live nodes, the driver's first: with their free resources, and with their total resources."""
    from ray._private.state import available_resources_per_node  # Ray has no public function for it (2.60)

    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in _ray_nodes() if node["Alive"]]
    alive.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]))
    available = available_resources_per_node()  # type: ignore[no-untyped-call]
    free = [_node(node, available.get(node["NodeID"], {})) for node in alive if _is_up(node)]
    ids = {node.node_id for node in free}
    return free, [_node(node, node["Resources"]) for node in alive if node["NodeID"] in ids]


def _ray_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _node(node: dict[str, Any], resources: dict[str, float]) -> ClusterNode:
    return ClusterNode(
        node_id=node["NodeID"],
        address=node["NodeManagerAddress"],
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
    )


def _is_reachable(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] and _is_up(node) for node in _ray_nodes())


def _is_up(node: dict[str, Any]) -> bool:
    return _accepts_connection(node["NodeManagerAddress"], node["NodeManagerPort"])


def _accepts_connection(address: str, port: int) -> bool:
    """Return True if the raylet there accepts a connection. Ray itself notices a dead one only by its health checks."""
    try:
        socket.create_connection((address, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True


def _num_cores(node_id: str) -> int:
    """Return the cores of this process on the driver's node; on others Ray's count, which may have been set by hand."""
    if node_id == ray.get_runtime_context().get_node_id():
        return len(os.sched_getaffinity(0))
    return next(int(node["Resources"].get("CPU", 1)) for node in _ray_nodes() if node["NodeID"] == node_id)
