"""Start the actor by which producers join over HTTPS, on the driver's node, and admit those that wait there."""

import logging
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coati_rl.config import Config
from coati_rl.errors import RunError
from coati_rl.processes.actor_classes import START_TIMEOUT_S
from coati_rl.processes.actor_process import ActorContext
from coati_rl.processes.ray_environment import actor_environment
from coati_rl.runtime.joined_handle import JOIN_SERVER, JoinedHandle
from coati_rl.runtime.managed_actor import ManagedActor
from coati_rl.runtime.remote import wait_for

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
_FAREWELL_S = 3.0  # a producer asks every two seconds
_CALLS = 256  # at a time: each producer has one for as long as it works, and others while weights are sent


class JoinServerHandle:
    """Hold the actor; without it nobody joins any more, and the run goes on."""

    def __init__(self, cls: type, config: Config, context: ActorContext, *, namespace: str) -> None:
        """Start it, and wait until it listens. Raises: RunError."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": _CALLS, "scheduling_strategy": here}
        options["runtime_env"] = {"env_vars": {**actor_environment(), "CUDA_VISIBLE_DEVICES": ""}}
        actor: Any = ray.remote(cls).options(name=JOIN_SERVER, namespace=namespace, **options)
        self._handle = actor.remote(config, context)
        self.url: str = wait_for(self._handle.url.remote(), who="the join server", timeout_s=START_TIMEOUT_S)
        self._is_lost = False

    def waiting(self) -> list[str]:
        """Return the keys of producers whose engines are loaded, each once."""
        if self._is_lost:
            return []
        try:
            keys: list[str] = wait_for(self._handle.waiting.remote(), who="the join server", timeout_s=_ANSWER_S)
        except RunError as error:
            self._is_lost = True
            logger.warning("no producer can join any more: %s", error)
            return []
        return keys

    def admit(self, key: str, producer_id: int) -> ManagedActor:
        """Give a producer its number. Raises: RunError if the join server has ended."""
        wait_for(self._handle.admit.remote(key, producer_id), who="the join server", timeout_s=_ANSWER_S)
        handle = JoinedHandle(self._handle, producer_id)
        return ManagedActor(name=f"producer-{producer_id}", handle=handle, task=handle.start.remote())

    def end(self) -> None:
        """Tell producers that are still connected that the run is over, and kill the actor."""
        with suppress(RunError):
            told = self._handle.tell_over.remote(_FAREWELL_S)
            wait_for(told, who="the join server", timeout_s=2 * _FAREWELL_S)
        ray.kill(self._handle)
