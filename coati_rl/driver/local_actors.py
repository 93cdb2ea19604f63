"""Run a job on a dataset without Ray: trainers are child processes, or torchrun's; the coordinator is in the driver.

Consumes: a prepared job. Produces: what the supervisor watches, see `Actors`. The trainers are the classes of a run,
with the same environment, cores, logs, heartbeats and deadlines; `local_trainer` is what runs in their processes.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from coati_rl.config.training import TrainingConfig
from coati_rl.errors import CoatiError, PeerLostError
from coati_rl.preflight.prepared import PreparedJob
from coati_rl.processes.actor_classes import START_TIMEOUT_S, ActorClasses
from coati_rl.processes.actor_process import ActorContext
from coati_rl.processes.calls import CallServer
from coati_rl.processes.hangs import HangTimeouts
from coati_rl.processes.heartbeats import Heartbeat, Heartbeats
from coati_rl.processes.run_dir import RunPaths, checkpoint_bytes
from coati_rl.processes.torchrun_trainers import TorchrunTrainers
from coati_rl.processes.trainer_process import TrainerProcess, environment_of, newer_beat, spawn
from coati_rl.text import count
from coati_rl.torchrun import num_local, torchrun_world

logger = logging.getLogger(__name__)

# What trainers may call.
_COORDINATOR_CALLS = ("next_work", "report_step", "report_saved", "report_evaluation", "report_reference")
_REGISTRY_CALLS = ("job", "open_rendezvous", "rendezvous", "started", "beat", "end")
_LOOK_S, _SAY_S = 0.05, 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerJob:
    """Hold what a trainer is made of."""

    trainer: type
    config: TrainingConfig
    context: ActorContext
    run_dir: Path
    checkpoint_dir: Path
    resume_dir: Path | None


@dataclass(slots=True)
class _Registry:
    """Tell trainers their jobs and where they meet, and hold what they report; from any thread."""

    jobs: Sequence[TrainerJob]
    trainers: dict[int, TrainerProcess] = field(default_factory=dict)
    where: Any = None  # the trainers meet
    changed: threading.Condition = field(default_factory=threading.Condition)

    def job(self, rank: int) -> TrainerJob:
        return self.jobs[rank]

    def open_rendezvous(self, where: Any) -> None:
        with self.changed:
            self.where = where
            self.changed.notify_all()

    def rendezvous(self) -> Any:
        with self.changed:
            if not self.changed.wait_for(lambda: self.where is not None, START_TIMEOUT_S):
                raise PeerLostError(f"trainer-0 did not open a store within {START_TIMEOUT_S:g} s")
            return self.where

    def started(self, rank: int) -> None:
        self.trainers[rank].is_started = True

    def beat(self, rank: int, beat: Heartbeat) -> None:
        self.trainers[rank].beat = beat
        self.trainers[rank].num_beats += 1

    def end(self, rank: int, outcome: int | CoatiError) -> None:
        self.trainers[rank].outcome = outcome


@contextmanager
def on_this_machine(
    prepared: PreparedJob,
    paths: RunPaths,
    classes: ActorClasses,
    *,
    scratch: Path,
    on_status: Callable[[str], None],
) -> Iterator["Callable[[], LocalActors]"]:
    """Yield the function that creates the processes; nothing has to be there before. See `actor_group.in_ray`."""
    yield lambda: LocalActors(prepared, paths, classes, scratch=scratch)


class LocalActors:
    """Create and hold the processes of a job on a dataset; implements `Actors` of the supervisor."""

    def __init__(self, prepared: PreparedJob, paths: RunPaths, classes: ActorClasses, *, scratch: Path) -> None:
        """Make the coordinator; `scratch` is a private directory for a socket."""
        if classes.make_coordinator is None:
            raise AssertionError("a job on this machine needs a coordinator of the driver's own")
        self.coordinator = classes.make_coordinator(prepared, paths)
        self._prepared, self._classes = prepared, classes
        self.starting: dict[int, TrainerProcess] = {}  # a job has no producers
        self.producers: dict[int, TrainerProcess] = {}
        self.reward_models: list[TrainerProcess] = []
        self.scorers: list[TrainerProcess] = []
        world = torchrun_world()
        self._torchrun = None if world is None else TorchrunTrainers(world)
        self._address = "" if self._torchrun is None else self._torchrun.address()
        self._run_dir = paths.run_dir
        config, resume = prepared.config, prepared.resume
        size = checkpoint_bytes(config, prepared.plan.precision)
        self.heartbeats = Heartbeats(
            HangTimeouts.of(config, checkpoint_bytes=size),
            ask=lambda trainer: (trainer, trainer.num_beats),
            answer=newer_beat,
        )
        self._registry = _Registry(
            [
                TrainerJob(
                    trainer=classes.trainer,
                    config=config,
                    context=self._context(rank, paths),
                    run_dir=paths.run_dir,
                    checkpoint_dir=paths.checkpoints,
                    resume_dir=resume.directory if resume else None,
                )
                for rank in range(config.parallel.num_trainers)
            ]
        )
        self.trainers = self._registry.trainers
        objects = {"registry": (self._registry, _REGISTRY_CALLS), "coordinator": (self.coordinator, _COORDINATOR_CALLS)}
        self._calls = CallServer(objects, scratch, address=self._address)

    def start(self, on_status: Callable[[str], None] = lambda text: None) -> None:
        """Start all trainers and wait until they have loaded the model.

        Args:
            on_status: gets, every two seconds, how many of them are ready.
        """
        environments = [self._environment(rank) for rank in range(len(self._registry.jobs))]
        if self._torchrun is None:
            for rank, environment in enumerate(environments):
                self._start(rank, environment)
        else:
            for rank, job in enumerate(self._registry.jobs):  # before they can call
                self.trainers[rank] = TrainerProcess(name=job.context.name, spawned=None)
            self._start(0, environments[0])
            self._torchrun.invite(self._calls.invitation, environments, self._run_dir)
        deadline, said = time.monotonic() + START_TIMEOUT_S, time.monotonic()
        while loading := [each for each in self.trainers.values() if not each.is_started]:
            for trainer in loading:
                if trainer.is_done():
                    trainer.result()
            if time.monotonic() > deadline:
                raise PeerLostError(f"{loading[0].name} was not ready after {START_TIMEOUT_S:g} s")
            if time.monotonic() - said >= _SAY_S:
                said = time.monotonic()
                ready = len(self.trainers) - len(loading)
                on_status(f"starting: {ready} of {count(len(self.trainers), 'trainer')} loaded")
            time.sleep(_LOOK_S)

    def members(self) -> list[TrainerProcess]:
        return list(self.trainers.values())

    def dead_raylets(self) -> list[str]:
        """Return nothing: there is no Ray."""
        return []

    def add_producer(self) -> NoReturn:
        """Raise an AssertionError: a job on a dataset has no producers."""
        raise AssertionError("a job on a dataset has no producers")

    def admit_producer(self, producer_id: int) -> None:
        self.add_producer()

    def drop_producer(self, producer_id: int, cause: str) -> None:
        self.add_producer()

    def end(self) -> None:
        """Kill all trainers, with what they have started."""
        for trainer in self.trainers.values():
            trainer.end()
        self._calls.close()
        if self._torchrun is not None:
            self._torchrun.close()

    def _environment(self, rank: int) -> dict[str, str]:
        """Return the variables of a trainer's process."""
        config, plan = self._prepared.config, self._prepared.plan
        trainer_class: Any = self._classes.trainer
        own = trainer_class.environment(config, plan.device)
        if self._address:
            own.pop("GLOO_SOCKET_IFNAME", None)  # the loopback interface; the process group finds the right one
        return environment_of(config, rank, plan.device, plan.precision, own)

    def _start(self, rank: int, environment: dict[str, str]) -> None:
        """Give a trainer its job: the process that was started early, if its variables have turned out right."""
        context = self._registry.jobs[rank].context
        spawned = next((each for each in self._classes.early_trainers[rank : rank + 1]), None)
        if is_new := spawned is None or spawned.environment != environment:
            context.log_dir.mkdir(parents=True, exist_ok=True)
            spawned = spawn(rank, environment, context.log_dir / f"{context.name}.log")
        self.trainers[rank] = TrainerProcess(name=context.name, spawned=spawned)  # before it can call
        self.trainers[rank].invite(self._calls.invitation)
        logger.info(
            "%s: process %d, slot %d of %d, started %s",
            context.name,
            spawned.process.pid,
            context.slot,
            context.num_slots,
            "now" if is_new else "early",
        )

    def _context(self, rank: int, paths: RunPaths) -> ActorContext:
        plan, num_slots = self._prepared.plan, num_local(self._prepared.config.parallel.num_trainers)
        return ActorContext(
            name=f"trainer-{rank}",
            log_dir=paths.logs,
            device=plan.device,
            dtype="bfloat16" if plan.precision == "bf16" else "float32",
            slot=rank % num_slots,
            num_slots=num_slots,
            address=self._address,
        )
