"""Create, start, replace and end the actors of a run.

There are one coordinator, T trainers, P producers, and any scorers and copies of reward models. A dead producer's
replacement gets a new number and its reservation.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray

from coati_rl.config import Config
from coati_rl.config.engine_urls import ServerShares
from coati_rl.preflight.prepared import PreparedJob
from coati_rl.processes.actor_classes import START_TIMEOUT_S, ActorClasses
from coati_rl.processes.actor_process import ActorContext, device_environment
from coati_rl.processes.hangs import HangTimeouts
from coati_rl.processes.run_dir import RunPaths, checkpoint_bytes
from coati_rl.processes.slow_phase import repeated
from coati_rl.runtime import remote
from coati_rl.runtime.cluster import actor_options, own_namespace, ray_cluster
from coati_rl.runtime.coordinator_actor import CoordinatorActor
from coati_rl.runtime.join_server_handle import JoinServerHandle
from coati_rl.runtime.joined_handle import end_producer
from coati_rl.runtime.managed_actor import ManagedActor, num_done
from coati_rl.runtime.placement_manager import PlacementManager, Reservation
from coati_rl.runtime.ray_heartbeats import ray_heartbeats
from coati_rl.text import count

logger = logging.getLogger(__name__)

_LOOK_S = 0.5  # between updates of what is waited for
_REWARD_CALLS = 64  # groups that a reward model is asked for at the same time; further calls wait in Ray


@contextmanager
def in_ray(
    prepared: PreparedJob,
    paths: RunPaths,
    classes: ActorClasses,
    *,
    scratch: Path,
    on_status: Callable[[str], None],
) -> Iterator["Callable[[], ActorGroup]"]:
    """Start Ray, or join it, for the time of the block. Yields: the function that creates the actors."""
    config, plan = prepared.config, prepared.plan
    with ExitStack() as cluster:
        with repeated(lambda: on_status("starting: Ray"), every_s=_LOOK_S):
            cluster.enter_context(
                ray_cluster(
                    config,
                    num_cpus=config.num_producers
                    + config.parallel.num_trainers
                    + config.parallel.ref_devices
                    + config.reward_models.num_actors,
                    num_gpus=plan.num_devices if plan.device == "cuda" else 0,
                    scratch=scratch,
                )
            )
        yield lambda: ActorGroup(prepared, paths, classes)


class ActorGroup:
    """Create and hold the actors of a run in Ray; implements `Actors` of the supervisor."""

    def __init__(self, prepared: PreparedJob, paths: RunPaths, classes: ActorClasses) -> None:
        self._config = prepared.config
        self._prepared, self._paths, self._classes = prepared, paths, classes
        self._num_producers = 0  # created so far
        self._servers = ServerShares(self._config.engine_urls)
        self._namespace = own_namespace()
        self._placement = PlacementManager(self._config, prepared.plan.device)
        if self._config.cluster.master_address and prepared.plan.device == "cuda":
            from coati_rl.runtime.node_gpus import check_node_gpus  # imports torch

            check_node_gpus(prepared.check_gpus, self._placement.nodes)
        context = self._context("coordinator", None)
        self._coordinator = CoordinatorActor(prepared, paths, classes.coordinator, context, namespace=self._namespace)
        self.coordinator = self._coordinator.client
        self._trainer_starts: list[Any] = []  # references
        self.trainers: dict[int, ManagedActor] = {}
        self.starting: dict[int, ManagedActor] = {}  # producers that load their engine
        self.producers: dict[int, ManagedActor] = {}
        self.reward_models: list[ManagedActor] = []
        self.scorers: list[ManagedActor] = []
        self._join_server: JoinServerHandle | None = None
        size = checkpoint_bytes(self._config, prepared.plan.precision)
        self.heartbeats = ray_heartbeats(HangTimeouts.of(self._config, checkpoint_bytes=size))

    def start(self, on_status: Callable[[str], None] = lambda text: None) -> None:
        """Create all actors and wait for trainers and reward models; producers may still load their engines.

        Args:
            on_status: gets, every two seconds, how many of them are ready.
        """
        wait_for = partial(remote.wait_for, timeout_s=START_TIMEOUT_S, meanwhile=lambda: on_status(self._loading()))
        handles = [self._make_trainer(rank) for rank in range(self._config.parallel.num_trainers)]
        rendezvous = handles[0].open_rendezvous.remote()
        if self._config.cluster.master_port:  # a port in use is found before engines are loaded
            wait_for(rendezvous, who="trainer-0")
        self.reward_models = self._make_reward_models()  # before the producers, whose scorers look for them
        self.scorers = [self._make_scorer(number) for number in range(self._config.parallel.ref_devices)]
        if not self._config.takes_turns:
            self._add_producers()
        where = wait_for(rendezvous, who="trainer-0")
        self._trainer_starts = [handle.start.remote(where) for handle in handles]
        for rank, reference in enumerate(self._trainer_starts):
            wait_for(reference, who=f"trainer-{rank}")
        for member in (*self.reward_models, *self.scorers):
            wait_for(member.task, who=member.name)
        self.reward_models, self.scorers = (
            [replace(each, task=each.handle.run.remote()) for each in members]
            for members in (self.reward_models, self.scorers)
        )
        self.trainers = {
            rank: ManagedActor(
                name=f"trainer-{rank}",
                handle=handle,
                task=handle.run.remote(self._coordinator.client_of_actors(), self._namespace),
            )
            for rank, handle in enumerate(handles)
        }
        if self._config.takes_turns:  # they load in their own turn, which is the first
            self._add_producers()
        if self._classes.join_server is not None:
            context = self._context("join-server", None)
            config = cast("Config", self._config)
            self._join_server = JoinServerHandle(self._classes.join_server, config, context, namespace=self._namespace)

    def _add_producers(self) -> None:
        for _ in range(self._config.num_producers):
            self.add_producer()

    def _loading(self) -> str:
        """Say how many of the actors that are being started are ready."""
        parts = {
            "trainer": (self._trainer_starts, self._config.parallel.num_trainers),
            "producer": ([member.task for member in self.starting.values()], self._config.num_producers),
            "reward model": ([member.task for member in self.reward_models], len(self.reward_models)),
            "scorer": ([member.task for member in self.scorers], len(self.scorers)),
        }
        ready = [f"{num_done(tasks)} of {count(number, name)}" for name, (tasks, number) in parts.items() if number]
        return f"starting: {', '.join(ready)} loaded"

    def add_producer(self) -> int:
        """Start a producer under a new number, without waiting for it. Returns: the number."""
        return self._start_producer(self._placement.acquire())

    def add_producer_if_room(self) -> int | None:
        """Start a producer if a node has room for it. Returns: its number, None if none has."""
        reservation = self._placement.acquire_more()
        return None if reservation is None else self._start_producer(reservation)

    def add_joining(self) -> None:
        """Give the producers that wait to join over HTTPS their numbers."""
        if self._join_server is None:
            return
        for key in self._join_server.waiting():
            producer_id = self._next_number()
            self.starting[producer_id] = self._join_server.admit(key, producer_id)

    def _next_number(self) -> int:
        self._num_producers += 1
        return self._num_producers - 1

    def _start_producer(self, reservation: Reservation) -> int:
        producer_id = self._next_number()
        context = self._context(f"producer-{producer_id}", reservation)
        context = replace(context, server=self._servers.take(producer_id))
        producer_cls: Any = self._classes.producer
        options = self._options(context.name, reservation, producer_cls)
        handle: Any = (
            ray.remote(producer_cls)
            .options(**options)
            .remote(producer_id, self._config, context, self._classes.make_reward)
        )
        self.starting[producer_id] = ManagedActor(
            name=context.name, handle=handle, task=handle.start.remote(), reservation=reservation
        )
        return producer_id

    def admit_producer(self, producer_id: int) -> None:
        """Start the work of a producer whose engine is loaded."""
        member = self.starting.pop(producer_id)
        self.coordinator.add_producer(producer_id, is_extra=member.is_joined)
        task = member.handle.run.remote(self._coordinator.client_of_actors())
        self.producers[producer_id] = replace(member, task=task)

    def drop_producer(self, producer_id: int, cause: str, *, leaves: bool = False) -> None:
        """End a producer, dead, hung or alive, and issue its prompts again; with `leaves` none is to replace it."""
        member = self.producers.pop(producer_id, None) or self.starting.pop(producer_id, None)
        if member is not None:
            self.heartbeats.end(member.name)
            self._servers.release(producer_id)
            # Before it ends: a trainer that waits for its commit would report that as the cause.
            self.coordinator.remove_producer(producer_id, cause, leaves=leaves)
            end_producer(member.handle)
            if member.reservation is not None:
                self._placement.release(member.reservation, is_leaving=leaves)

    def dead_raylets(self) -> list[str]:
        return self._placement.dead_raylets()

    def members(self) -> list[ManagedActor]:
        """Return all actors but the coordinator and the join server."""
        of_producers = [each for each in (*self.producers.values(), *self.starting.values()) if not each.is_joined]
        return [*self.trainers.values(), *of_producers, *self.reward_models, *self.scorers]

    def end(self) -> None:
        """Kill every actor."""
        if self._join_server is not None:
            self._join_server.end()
        for handle in [member.handle for member in self.members()] + [self._coordinator.handle]:
            ray.kill(handle)
        self.heartbeats.end_silent()

    def _make_trainer(self, rank: int) -> Any:
        reservation = self._placement.trainers[rank]
        context = self._context(f"trainer-{rank}", reservation)
        options = self._options(context.name, reservation, self._classes.trainer)
        resume = self._prepared.resume
        return (
            ray.remote(self._classes.trainer)
            .options(**options)
            .remote(
                rank,
                self._config,
                context,
                run_dir=self._paths.run_dir,
                checkpoint_dir=self._paths.checkpoints,
                resume_dir=resume.directory if resume else None,
            )
        )

    def _make_reward_models(self) -> list[ManagedActor]:
        """Create the copies of all reward models, which begin to load."""
        members: list[ManagedActor] = []
        reservations = iter(self._placement.reward_models)
        for directory, names in self._config.reward_models.names.items():
            for name in names:
                reservation = next(reservations)
                actor_cls: Any = self._classes.reward_model
                context = self._context(name, reservation)
                if not reservation.need.gpus:
                    context = replace(context, device="cpu")
                # Calls that wait for a batch occupy the other threads.
                decorate: Any = ray.remote  # whose type does not know concurrency_groups
                actor: Any = decorate(concurrency_groups={"heartbeat": 1})(actor_cls)
                options = {**self._options(name, reservation, actor_cls), "max_concurrency": _REWARD_CALLS}
                handle: Any = actor.options(**options).remote(Path(directory), context)
                member = ManagedActor(name=name, handle=handle, task=handle.start.remote(), reservation=reservation)
                members.append(member)
        return members

    def _make_scorer(self, number: int) -> ManagedActor:
        """Create a copy of reference and teacher, which begins to load."""
        reservation, scorer_cls = self._placement.scorers[number], self._classes.scorer
        context, cls = self._context(f"scorer-{number}", reservation), cast("Any", scorer_cls)
        # Requests of trainers that wait for each other occupy threads.
        options = {
            **self._options(context.name, reservation, cls),
            "max_concurrency": 2 * self._config.parallel.num_trainers + 4,
        }
        handle: Any = ray.remote(cls).options(**options).remote(self._config, context)
        return ManagedActor(name=context.name, handle=handle, task=handle.start.remote(), reservation=reservation)

    def _options(self, name: str, reservation: Reservation, actor_cls: Any) -> dict[str, Any]:
        plan = self._prepared.plan
        environment = {
            **device_environment(plan.device, plan.precision),
            **actor_cls.environment(self._config, plan.device),
        }
        return {
            **actor_options(name=name, num_threads=reservation.num_threads, environment=environment),
            "namespace": self._namespace,
            "num_cpus": reservation.need.cpus,
            "num_gpus": reservation.need.gpus,
            "scheduling_strategy": reservation.strategy,
        }

    def _context(self, name: str, reservation: Reservation | None) -> ActorContext:
        if reservation is not None:
            slot, num_slots = reservation.slot, reservation.num_slots
            logger.info("%s: %s at %s, slot %d of %d", name, reservation.need, reservation.address, slot, num_slots)
        plan = self._prepared.plan
        return ActorContext(
            name=name,
            log_dir=self._paths.logs,
            device=plan.device,
            dtype="bfloat16" if plan.precision == "bf16" else "float32",
            slot=reservation.slot if reservation else 0,
            num_slots=reservation.num_slots if reservation else 1,
            gpus=reservation.gpus if reservation else (),
        )
