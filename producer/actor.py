"""Run a producer as a Ray actor: an engine, reward workers, and the rollout loop that connects them.

`run` blocks in one of the actor's threads; weights are received in others (`stage_weights`, `commit_weights`). torch is
imported when the engine loads, not with this module, which the driver imports to name the class.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from coati_rl.config import Config
from coati_rl.config.engine_rules import answers_per_prompt
from coati_rl.errors import EngineError
from coati_rl.observability.phases import PHASES
from coati_rl.observability.timeline import Timeline
from coati_rl.probe import ProbeAnswer
from coati_rl.processes.actor_process import ActorContext, enter_actor
from coati_rl.processes.heartbeats import Heartbeat
from coati_rl.processes.imports import uncollected
from coati_rl.protocols import GenerationEngine, GroupScorer, ProducerCoordinator
from coati_rl.runtime.address import own_address
from coati_rl.runtime.ray_heartbeats import actor_heartbeat
from coati_rl.types import CommitResult, Device
from producer.rollout_loop import RolloutLoop

if TYPE_CHECKING:
    from producer.made_environment import OwnedEnvironment

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 50.0  # for a prompt of some hundred tokens, behind what the engine is busy with


class ProducerActor:
    """Run one inference engine with its reward workers."""

    @staticmethod
    def environment(config: Config, device: Device) -> dict[str, str]:
        """Return the environment variables that must be set before the engine's process starts."""
        from producer.engines.environment import engine_environment

        return engine_environment(
            device,
            config.parallel.producer_tensor_parallel_size,
            compiles=config.sampling.enforce_eager is False,
        )

    def __init__(
        self, producer_id: int, config: Config, context: ActorContext, make_reward: Callable[[], GroupScorer]
    ) -> None:
        enter_actor(context)
        self._timeline = Timeline(context.log_dir.parent / "timeline", context.name)
        self._producer_id = producer_id
        self._config = config
        self._context = context
        self._reward = make_reward()  # its processes start while the engine loads
        self._engine: GenerationEngine | None = None
        self._environment: OwnedEnvironment | None = None
        self._loop: RolloutLoop | None = None
        self._has_ended = threading.Event()

    def start(self) -> float:
        """Load the engine with the initial weights. Returns: the time it took, in seconds."""
        begin, config = time.perf_counter(), self._config
        with uncollected():
            from producer.made_environment import make_environment
            from producer.run_engine import load_engine

            if config.sampling.backend == "vllm" and not self._context.server:
                import vllm.v1.engine.llm_engine  # noqa: F401

        self._engine = load_engine(config, self._context)
        self._environment = make_environment(config, log_dir=self._context.log_dir)
        logger.info("producer %d is ready", self._producer_id)
        return time.perf_counter() - begin

    def run(self, coordinator: ProducerCoordinator) -> bool:
        """Generate and score rollouts until the run is over, or this producer leaves it. Returns: True if it does."""
        loop = self._loop = RolloutLoop(
            self._producer_id,
            coordinator,
            self._loaded_engine(),
            self._reward,
            max_sequences=self._config.sequences_in_flight,
            group_size=answers_per_prompt(self._config),
            environment=self._environment,
            by_sample=self._config.sync.partial_rollouts,
            cuts_overdue=self._config.environment.stale_episodes == "cut",
            timeline=self._timeline,
        )
        try:
            loop.run()
        finally:
            if not loop.is_leaving:  # else it takes part in syncs until the driver ends it
                self.close()
            self._has_ended.set()
        logger.info("producer %d is done", self._producer_id)
        return loop.is_leaving

    def leave(self, address: str, timeout_s: float) -> bool:
        """Give back all prompts at once and end, if this node has the address. Returns: whether it has, in time."""
        if address != own_address(self._config) or self._loop is None:
            return False
        self._loop.leave()
        return self._has_ended.wait(timeout_s)

    def beat(self) -> Heartbeat:
        """Return this process's heartbeat; answered while other threads of this actor work."""
        return actor_heartbeat()

    def stage_weights(self, manifest: str, rendezvous: str, timeout_s: float) -> tuple[str, ...]:
        """Receive an update beside the serving weights. Returns: one digest per tensor-parallel rank.

        Args:
            manifest: a WeightManifest as JSON.
            rendezvous: a Rendezvous as JSON.
            timeout_s: time limit of the transfer, in seconds.
        """
        from coati_rl.transport.manifest import WeightManifest
        from coati_rl.transport.rendezvous import Rendezvous

        update, invitation = WeightManifest.from_json(manifest), Rendezvous.from_json(rendezvous)
        with PHASES.phase("stage weights"), self._timeline.start("stage weights", policy_version=update.policy_version):
            return self._loaded_engine().stage_weights(update, invitation, timeout_s=timeout_s)

    def commit_weights(self, policy_version: int, probe: Sequence[int], timeout_s: float) -> CommitResult:
        """Serve the staged weights, at once or when no request is running, and score the probe with them."""
        engine, begin = self._loaded_engine(), time.perf_counter()
        with PHASES.phase("commit weights"), self._timeline.start("commit weights", policy_version=policy_version):
            in_flight = self._config.sync.commits_in_flight
            identities = engine.commit_weights(policy_version, in_flight=in_flight, timeout_s=timeout_s)
        self._timeline.instant("policy version", policy_version=policy_version)
        seconds = time.perf_counter() - begin
        answer = ProbeAnswer(logprobs=np.empty(0, dtype=np.float32))
        if probe:
            answer = engine.probe(probe, timeout_s=min(timeout_s, _PROBE_TIMEOUT_S))
        return CommitResult(
            seconds=seconds, probe_logprobs=answer.logprobs, identities=identities, probe_routes=answer.routes
        )

    def sleep(self, timeout_s: float) -> None:
        """Give up the engine's memory until weights are committed, in the trainers' turn."""
        with PHASES.phase("go to sleep"):
            self._loaded_engine().sleep(timeout_s=timeout_s)

    def close(self) -> None:
        """Stop engine, environment and reward workers."""
        self._reward.close()
        if self._environment is not None:
            self._environment.close()
        if self._engine is not None:
            self._engine.close()
        self._timeline.close()

    def _loaded_engine(self) -> GenerationEngine:
        if self._engine is None:
            raise EngineError(f"producer {self._producer_id} was not started")
        return self._engine
