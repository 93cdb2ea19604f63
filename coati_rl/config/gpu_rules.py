"""Set what a run takes of a device unless told otherwise."""

from coati_rl.config.config import Config
from coati_rl.types import Device

TOKEN_BUDGET = 16384  # of a micro-batch: fewer tokens leave matrix products, and the traffic of gradients, inefficient


def with_device_defaults(config: Config, device: Device) -> Config:
    """Set what depends on the device and is not given.

    On GPUs micro-batches are bounded by tokens, with gradient checkpointing, where the user has set neither bound.
    """
    said = config.parallel.model_fields_set
    if device == "cpu" or {"train_microbatch_size", "max_tokens_per_microbatch"} & said:
        return config
    defaults = {
        "train_microbatch_size": config.parallel.train_minibatch_size * config.sampling.num_generations,
        "max_tokens_per_microbatch": max(TOKEN_BUDGET, config.max_model_len),
        "gradient_checkpointing": True,
    }
    return config.with_changes(**{name: value for name, value in defaults.items() if name not in said})
