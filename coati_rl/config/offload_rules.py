"""Check what is offloaded: models that a job has, with weights of their own."""

from collections.abc import Iterator

from coati_rl.config.held_models import frozen_models, remote_models
from coati_rl.config.training import TrainingConfig


def offload_problems(config: TrainingConfig) -> Iterator[str]:
    """Return why the memory of a model cannot be given up, in one message with a remedy."""
    given, known = config.parallel.offload, {"optimizer", "all", *(frozen_models(config) - remote_models(config))}
    missing = [name for name in given if name not in known]
    if not missing:
        return
    left = [name for name in given if name in known]
    remedy = f"use --offload {','.join(left)}" if left else "leave it out"
    is_shared = config.lora.is_on and missing != ["teacher"]
    shared = ", as with --lora-rank it is the model's base, which takes no memory of its own" if is_shared else ""
    if remote := remote_models(config) & {*missing}:
        shared = f", as --ref-devices {config.parallel.ref_devices} takes it off them"
        missing = [name for name in missing if name in remote]
    yield f"--offload {','.join(given)}: trainers hold no {' and no '.join(missing)} model of its own{shared}; {remedy}"
