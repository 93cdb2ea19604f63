"""The producer as a Ray actor: an engine, reward workers, and the rollout loop between them.

`run` blocks in one of the actor's threads; weights arrive in others (`stage_weights`, `commit_weights`).
"""

import logging
import time
from collections.abc import Callable

from coati_rl.config import Config
from coati_rl.errors import EngineError
from coati_rl.protocols import GenerationEngine, GroupScorer, ProducerCoordinator
from coati_rl.runtime.process import Place, enter_actor
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import Device
from producer.engines import create_engine
from producer.engines.environment import engine_environment
from producer.rollout_loop import RolloutLoop

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0  # to load the engine


class ProducerActor:
    """One inference engine of the run."""

    @staticmethod
    def environment(config: Config, device: Device) -> dict[str, str]:
        """Environment variables that the engine needs before its process starts."""
        return engine_environment(device, config.producer_tensor_parallel_size)

    def __init__(self, producer_id: int, config: Config, place: Place, make_reward: Callable[[], GroupScorer]) -> None:
        enter_actor(place)
        self._producer_id = producer_id
        self._config = config
        self._place = place
        self._reward = make_reward()  # its processes start while the engine loads
        self._engine: GenerationEngine | None = None

    def start(self) -> float:
        """Load the engine with the start weights. Returns: seconds it took."""
        begin, config = time.perf_counter(), self._config
        self._engine = create_engine(
            config.backend,
            model=config.model,
            tensor_parallel_size=config.producer_tensor_parallel_size,
            dtype=self._place.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.inference_microbatch_size * config.num_generations,
            seed=config.seed,
            device=self._place.device,
            load_timeout_s=START_TIMEOUT_S,
        )
        logger.info("producer %d is ready", self._producer_id)
        return time.perf_counter() - begin

    def run(self, coordinator: ProducerCoordinator) -> None:
        """Roll out until the run is over."""
        loop = RolloutLoop(
            self._producer_id,
            coordinator,
            self._loaded_engine(),
            self._reward,
            max_in_flight=self._config.inference_microbatch_size,
        )
        try:
            loop.run()
        finally:
            self.close()
        logger.info("producer %d is done", self._producer_id)

    def stage_weights(self, manifest: str, rendezvous: str, timeout_s: float) -> tuple[str, ...]:
        """Receive an update beside the serving weights; JSON in, one digest per tensor-parallel rank out."""
        return self._loaded_engine().stage_weights(
            WeightManifest.from_json(manifest), Rendezvous.from_json(rendezvous), timeout_s=timeout_s
        )

    def commit_weights(self, policy_version: int, timeout_s: float) -> None:
        """Serve the staged weights, as soon as what is generating has ended."""
        engine, deadline = self._loaded_engine(), time.monotonic() + timeout_s
        while engine.num_unfinished() and time.monotonic() < deadline:
            time.sleep(0.002)
        engine.commit_weights(policy_version)

    def close(self) -> None:
        """Stop engine and reward workers."""
        self._reward.close()
        if self._engine is not None:
            self._engine.close()

    def _loaded_engine(self) -> GenerationEngine:
        if self._engine is None:
            raise EngineError(f"producer {self._producer_id} was not started")
        return self._engine
