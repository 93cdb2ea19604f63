"""Run `coati-rl tinker-serve`: put together the parts that train and sample, for a server of Tinker's API."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from coati_rl.errors import ConfigError
from coati_rl.tinker.bases import Base
from coati_rl.tinker.command import Parts, run_command
from coati_rl.tinker.core import SamplingCore, TrainingCore
from coati_rl.types import Device

logger = logging.getLogger(__name__)

_MAX_TOKENS = 8192  # of a sequence, by default


def main(arguments: Sequence[str]) -> int:
    """Serve. Returns: the exit code."""
    return run_command(arguments, make_base)


def make_base(name: str, directory: Path, parts: Parts) -> Base:
    """Return a base model with its parts. Raises: ConfigError."""
    from coati_rl.preflight.prepare_generation import engine_device
    from coati_rl.preflight.resources import checked_model_config, slow_precision

    device = engine_device(parts.device, width=1)  # type: ignore[arg-type]
    precision = parts.precision or ("bf16" if device == "cuda" else "fp32")
    config, of_files = checked_model_config(directory, "sampled", flag=f"--model {name}", precision=precision)
    for warning in (*of_files, *slow_precision(precision, device)):
        logger.warning("%s", warning)
    positions = getattr(config, "max_position_embeddings", None) or _MAX_TOKENS
    if parts.max_tokens is not None and not 2 <= parts.max_tokens <= positions:
        raise ConfigError(f"--max-tokens {parts.max_tokens}: {name} has {positions} positions; give 2 to {positions}")
    length = parts.max_tokens or min(positions, _MAX_TOKENS)
    return Base(
        name=name,
        directory=directory,
        arch=str(config.model_type),
        training=_training(directory, precision=precision, device=device),
        sampling=_sampling(parts.sampler, directory, precision=precision, device=device, max_tokens=length),
    )


def _training(directory: Path, *, precision: str, device: Device) -> TrainingCore:
    from coati.training_session import TrainingSession

    return TrainingSession(directory, device=device, precision=precision)


def _sampling(sampler: str, directory: Path, *, precision: str, device: Device, max_tokens: int) -> SamplingCore:
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[precision]
    if sampler == "transformers":
        from producer.samplers.transformers_samplers import TransformersSamplers

        return TransformersSamplers(directory, max_tokens=max_tokens, dtype=dtype, device=device)
    from producer.engines import engine_environment
    from producer.samplers.vllm_samplers import VllmSamplers

    environment = engine_environment(device, 1)
    os.environ.update({name: value for name, value in environment.items() if name != "OMP_NUM_THREADS"})
    return VllmSamplers(directory, max_tokens=max_tokens, dtype=dtype, device=device)
