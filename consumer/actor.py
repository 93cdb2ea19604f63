"""Run a trainer as a Ray actor: join the trainers' process group, build the backend, run the train loop.

The training engine, torch and transformers are imported when a trainer starts, not with this module, which the driver
imports to name the class.
"""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coati_rl.checkpoint.directory import OBJECTIVE_KEY, load_state
from coati_rl.config.held_models import remote_models
from coati_rl.config.training import TrainingConfig
from coati_rl.config.update_rules import slow_seconds
from coati_rl.errors import EngineError
from coati_rl.observability.timeline import Timeline
from coati_rl.processes.actor_process import ActorContext, enter_actor
from coati_rl.processes.heartbeats import Heartbeat
from coati_rl.processes.imports import uncollected
from coati_rl.processes.run_dir import checkpoint_bytes
from coati_rl.protocols import TrainerCoordinator
from coati_rl.runtime.address import own_address
from coati_rl.types import Device
from consumer.environment import trainer_environment
from consumer.parallel.store_location import StoreLocation

if TYPE_CHECKING:
    from consumer.backend import Backend

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 600.0  # trainers wait for each other's rollouts and checkpoints in collectives


class TrainerActor:
    """Run one trainer rank."""

    @staticmethod
    def environment(config: TrainingConfig, device: Device) -> dict[str, str]:
        """Return the environment variables that must be set before the trainer's process starts."""
        return trainer_environment(config, device)

    def __init__(
        self,
        rank: int,
        config: TrainingConfig,
        context: ActorContext,
        *,
        run_dir: Path,
        checkpoint_dir: Path,
        resume_dir: Path | None = None,
    ) -> None:
        """Store the arguments; `resume_dir` is the checkpoint to resume from, None to start from the config's model."""
        enter_actor(context)
        self._timeline = Timeline(run_dir / "timeline", context.name)
        self._rank = rank
        self._device = context.device
        self._config = config
        self._context = context
        self._run_dir = run_dir
        self._checkpoint_dir = checkpoint_dir
        self._resume_dir = resume_dir
        self._listener: socket.socket | None = None
        self._backend: Backend | None = None

    def open_rendezvous(self) -> StoreLocation:
        """Create the store through which the trainers find each other; on rank 0 only.

        It is a private file (no open port) where this run started its own Ray, unless an address or a port is set.
        """
        from consumer.parallel.process_group import open_listener, private_store_location

        address, cluster = self._context.address or own_address(self._config), self._config.cluster
        if cluster.master_port == 0 and not cluster.master_address and not self._context.address:
            return private_store_location(address)
        self._listener = open_listener(address, cluster.master_port, is_shared=not cluster.master_address)
        return StoreLocation(address=address, port=int(self._listener.getsockname()[1]))

    def start(self, rendezvous: StoreLocation) -> float:
        """Join the other trainers and load the model. Returns: the time it took, in seconds."""
        begin, config = time.perf_counter(), self._config
        with uncollected():
            from consumer.backend import make_backend
            from consumer.jobs.job import backend_config
            from consumer.jobs.jobs import models_of
            from consumer.parallel.process_group import init_process_group

        # In a weight sync the ranks that hold a sender's other shards wait in a gather until the producers received;
        # at a checkpoint those that have written their files wait for the others.
        precision: Literal["bf16", "fp32"] = "bf16" if self._context.dtype == "bfloat16" else "fp32"
        save_s = slow_seconds(checkpoint_bytes(config, precision))
        timeout_s = COLLECTIVE_TIMEOUT_S + config.setting("sync_timeout_s", 0.0) + save_s
        device = init_process_group(
            rank=self._rank,
            world_size=config.parallel.num_trainers,
            rendezvous=rendezvous,
            listener=self._listener,
            timeout_s=timeout_s,
            seed=config.run.seed,
            device=self._device,
        )
        elsewhere = remote_models(config)
        models = models_of(config, self._resume_dir or Path(config.model.model))
        models = {role: source for role, source in models.items() if role not in elsewhere}
        settings = backend_config(config, models, dtype=self._context.dtype, run_dir=self._run_dir)
        self._backend = make_backend(settings, device=device, timeout_s=timeout_s)
        if elsewhere:
            self._backend.score_elsewhere(elsewhere, remote_scorers(config))
        if self._resume_dir is not None:
            self._backend.restore(self._resume_dir)
        logger.info("trainer %d is ready on %s", self._rank, device)
        return time.perf_counter() - begin

    def run(self, coordinator: TrainerCoordinator, namespace: str) -> int:
        """Train until the run is over. Returns: optimizer steps taken."""
        config, backend = self._config, self._backend
        if backend is None:
            raise EngineError(f"trainer {self._rank} was not started")
        from consumer.jobs.job import JobContext
        from consumer.jobs.jobs import job_of

        with closing(self._timeline), self._profiler() as profiler:
            trainer = JobContext(
                rank=self._rank,
                namespace=namespace,
                run_dir=self._run_dir,
                checkpoint_dir=self._checkpoint_dir,
                timeline=self._timeline,
                on_step=profiler.step if profiler else lambda: None,
                objective_state=load_state(self._resume_dir).get(OBJECTIVE_KEY, {}) if self._resume_dir else {},
            )
            with job_of(config).train_loop(config, trainer, backend, coordinator) as loop:
                steps: int = loop.run()
        logger.info("trainer %d is done after %d steps", self._rank, steps)
        return steps

    def beat(self) -> Heartbeat:
        """Return this process's heartbeat; answered while other threads of this actor work."""
        from coati_rl.runtime.ray_heartbeats import actor_heartbeat  # imports Ray

        return actor_heartbeat()

    @contextmanager
    def _profiler(self) -> Iterator[Any]:
        """Profile the second optimizer step with torch's profiler; the first one is the warm-up."""
        if not self._config.run.enable_profiling:
            yield None
            return
        from torch.profiler import profile, schedule

        path = self._run_dir / "profile" / f"{self._context.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with profile(
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
        ) as profiler:
            yield profiler


def remote_scorers(config: TrainingConfig) -> Any:
    """Return what calls the scorers of a run."""
    from coati_rl.runtime.remote import RemoteScorers  # imports Ray

    return RemoteScorers(config.parallel.ref_devices, timeout_s=config.cluster.phase_timeout_s)
