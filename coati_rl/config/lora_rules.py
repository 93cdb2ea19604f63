"""Check the settings of adapters: those without effect are refused, and what adapters do not allow."""

from collections.abc import Iterator

from coati_rl.config.config import Config
from coati_rl.config.fields import given_flags
from coati_rl.config.training import TrainingConfig


def lora_problems(config: TrainingConfig) -> Iterator[str]:
    """Why adapters cannot be trained like this, each with a remedy."""
    lora = config.lora
    if not lora.is_on:
        if given := given_flags(lora):
            yield f"{', '.join(given)} without --lora-rank: has no effect; give --lora-rank, or leave it out"
        return
    update = config.control.reference_update if isinstance(config, Config) else None
    if update is not None:
        yield (
            f"--reference-update {update} with --lora-rank: the reference is the model without the adapters, which "
            "does not move; leave it out, or train the weights"
        )
