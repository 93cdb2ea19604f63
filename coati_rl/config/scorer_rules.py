"""Check a job whose reference and teacher have devices of their own."""

from collections.abc import Iterator

from coati_rl.config.config import Config
from coati_rl.config.held_models import remote_models
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.training import TrainingConfig


def scorer_problems(config: TrainingConfig) -> Iterator[str]:
    """Return why the reference and the teacher cannot be placed so, each with a remedy."""
    devices = config.parallel.ref_devices
    if not devices:
        return
    flag = f"--ref-devices {devices}"
    if not remote_models(config):
        shared = config.lora.is_on and (not isinstance(config, Config) or config.algorithm.kl_coeff > 0)
        why = "with --lora-rank the reference is the base on the trainers, where it takes no memory of its own"
        yield f"{flag}: {why if shared else 'there is no reference and no teacher'}; leave it out"
    if isinstance(config, Config) and config.control.reference_moves is not None:
        yield (
            f"{flag} with --reference-update {config.control.reference_update}: a reference that follows the policy "
            "lies with it; leave one of them out"
        )
    if isinstance(config, OfflineConfig) and config.precomputes_reference:
        yield (
            f"{flag} with --precompute-reference: the devices would have nothing to do after the first pass; leave one "
            "of them out"
        )
