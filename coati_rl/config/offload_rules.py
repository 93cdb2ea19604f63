"""Check what is offloaded: models that a job has, with weights of their own."""

from collections.abc import Iterator

from coati_rl.config.held_models import frozen_models
from coati_rl.config.training import TrainingConfig


def offload_problems(config: TrainingConfig) -> Iterator[str]:
    """Return why the memory of a model cannot be given up, in one message with a remedy."""
    given, known = config.parallel.offload, {"optimizer", "all", *frozen_models(config)}
    missing = [name for name in given if name not in known]
    if not missing:
        return
    left = [name for name in given if name in known]
    remedy = f"use --offload {','.join(left)}" if left else "leave it out"
    shared = (
        ", as with --lora-rank it is the model's base, which takes no memory of its own" if config.lora.is_on else ""
    )
    yield f"--offload {','.join(given)}: this job has no {' and no '.join(missing)} model of its own{shared}; {remedy}"
