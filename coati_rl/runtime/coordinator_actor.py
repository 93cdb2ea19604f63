"""Start the coordinator's actor, and another one in its place when it is lost, which goes on from the ledger.

One that is lost before it has written anything is replaced by one that begins as it did.
"""

import logging
import time
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coati_rl.checkpoint.ledger_files import LEDGER, last_number
from coati_rl.config import Config
from coati_rl.errors import PeerLostError
from coati_rl.preflight.prepared import PreparedJob, unchecked
from coati_rl.processes.actor_process import ActorContext
from coati_rl.processes.ray_environment import actor_environment
from coati_rl.processes.run_dir import RunPaths
from coati_rl.runtime.remote import COORDINATOR, RemoteCoordinator, wait_for

logger = logging.getLogger(__name__)

_NAME_TIMEOUT_S = 15.0  # for Ray to give the name of a dead coordinator to another one
_TAKEOVER_S = 40.0  # for a coordinator to read the ledger
_LOOK_S = 0.25  # between tries to get the name


class CoordinatorActor:
    """Hold the run's coordinator, whichever it is; on the driver's node."""

    def __init__(
        self, prepared: PreparedJob, paths: RunPaths, actor_cls: type, context: ActorContext, *, namespace: str
    ) -> None:
        """Start it, without waiting for it."""
        self._prepared, self._paths, self._cls = replace(prepared, check_gpus=unchecked), paths, actor_cls
        self._context, self._namespace = context, namespace
        self._segment_before = last_number(paths.run_dir / LEDGER)  # of the run that is resumed
        self.handle = self._start()
        self._is_lost = False
        self.client = RemoteCoordinator(self.handle, replace=self._replace)

    def client_of_actors(self) -> RemoteCoordinator:
        """Return a client for another process, which finds a coordinator that takes over by its name."""
        return RemoteCoordinator(self.handle)

    def _replace(self, error: PeerLostError) -> Any:
        """Start another coordinator in the lost one's place. Raises: `error` if there is no ledger to go on from."""
        config = self._prepared.config
        if not isinstance(config, Config) or not config.run.ledger or self._is_lost:
            raise error
        self._is_lost = True  # until another one has taken over
        logger.info("%s; another coordinator takes over", error)
        ray.kill(self.handle)  # it may be alive and stopped
        deadline = time.monotonic() + _NAME_TIMEOUT_S
        while True:
            try:
                self.handle = self._start(takes_over=True)
                break
            except ValueError:  # raised by Ray while the dead one has the name
                if time.monotonic() > deadline:
                    raise error from None
                time.sleep(_LOOK_S)
        wait_for(self.handle.status.remote(), who="the coordinator", timeout_s=_TAKEOVER_S)
        self._is_lost = False
        return self.handle

    def _start(self, *, takes_over: bool = False) -> Any:
        config = self._prepared.config
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        num_producers = config.setting("max_producers", None) or config.num_producers
        waiting = 2 * (num_producers + config.parallel.num_trainers) + 8  # long polls, each of which blocks a thread
        options = {"num_cpus": 0, "max_concurrency": waiting, "scheduling_strategy": here, "max_restarts": 0}
        if config.cluster.master_address:  # in a Ray of our own it inherits them, and a process is there already
            options["runtime_env"] = {"env_vars": actor_environment()}
        actor: Any = ray.remote(self._cls).options(name=COORDINATOR, namespace=self._namespace, **options)
        arguments = {"takes_over_after": self._segment_before} if takes_over else {}  # a job on a dataset never does
        return actor.remote(self._prepared, self._paths, self._context, **arguments)
