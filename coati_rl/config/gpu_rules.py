"""Set what a training job takes of a device unless told otherwise."""

from typing import TypeVar

from coati_rl.config.config import Config
from coati_rl.config.training import TrainingConfig
from coati_rl.types import Device

Job = TypeVar("Job", bound=TrainingConfig)

TOKEN_BUDGET = 16384  # of a micro-batch: fewer tokens leave matrix products, and the traffic of gradients, inefficient


def with_device_defaults(config: Job, device: Device) -> Job:
    """Set what depends on the device and is not given.

    On GPUs micro-batches are bounded by tokens, with gradient checkpointing, where the user has set neither bound.
    """
    said = config.parallel.model_fields_set
    if device == "cpu" or {"train_microbatch_size", "max_tokens_per_microbatch"} & said:
        return config
    rows = config.parallel.train_batch_size
    if isinstance(config, Config):
        rows = config.parallel.train_minibatch_size * config.sampling.num_generations
    defaults = {
        "train_microbatch_size": rows,
        "max_tokens_per_microbatch": max(TOKEN_BUDGET, config.UNIT * config.max_sample_tokens),
        "gradient_checkpointing": True,
    }
    return config.with_changes(**{name: value for name, value in defaults.items() if name not in said})
