"""Load the engine of a run's producer from the run's configuration."""

from coati_rl.config import Config
from coati_rl.config.engine_rules import sequences_at_a_time
from coati_rl.coordinator.membership import UNSYNCED
from coati_rl.processes.actor_process import ActorContext
from coati_rl.protocols import GenerationEngine

START_TIMEOUT_S = 600.0  # to load the engine


def load_engine(config: Config, context: ActorContext) -> GenerationEngine:
    """Load it with the initial weights, which are proved by the first sync. Raises: ConfigError, EngineError."""
    from producer.engines import EngineOptions, create_engine

    options = EngineOptions.with_flags(
        config.sampling,
        model=config.model.model,
        tensor_parallel_size=config.parallel.producer_tensor_parallel_size,
        dtype=context.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=sequences_at_a_time(config),
        seed=config.run.seed,
        device=context.device,
        gpu_memory_utilization=config.parallel.gpu_memory_utilization,
        adapter=config.lora.sent_adapter,
        takes_turns=config.takes_turns,
        returns_routes=config.router_replay != "none",
        weights_dir=str(context.log_dir.parent / "engine_weights" / context.name),
    )
    return create_engine(
        context.server or config.sampling.backend,
        options,
        policy_version=UNSYNCED,
        load_timeout_s=START_TIMEOUT_S,
    )
