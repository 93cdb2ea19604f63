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
    if lora.load_in_4bit:
        yield from _four_bit_problems(config)
    update = config.control.reference_update if isinstance(config, Config) else None
    if update is not None:
        yield (
            f"--reference-update {update} with --lora-rank: the reference is the model without the adapters, which "
            "does not move; leave it out, or train the weights"
        )


def _four_bit_problems(config: TrainingConfig) -> Iterator[str]:
    """Why a model in 4 bits cannot be trained in this layout: blocks of numbers with one scale are not cut."""
    parallel = config.parallel
    if parallel.plugin == "fsdp2":
        yield "--load-in-4bit with --plugin fsdp2: its rows are not sharded; use --plugin hybrid, or leave it out"
    if parallel.tensor_parallel_size > 1:
        yield (
            f"--load-in-4bit with -tp {parallel.tensor_parallel_size}: weights in 4 bits are not cut; use -tp 1, with "
            "-pp or copies of the model, or leave it out"
        )
