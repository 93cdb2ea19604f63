"""Take from what has started this process where a run with producers goes: `ray job submit`, but not torchrun."""

import os
from collections.abc import Callable

from coati_rl.config.config import Config
from coati_rl.errors import ConfigError
from coati_rl.torchrun import torchrun_world


def with_launcher(config: Config, say: Callable[[str], None]) -> Config:
    """Return the configuration of a run that joins the cluster to which it was submitted.

    Args:
        config: as it was parsed.
        say: prints what is taken.
    Raises: ConfigError if torchrun has started several drivers.
    """
    world = torchrun_world()
    if world is not None and world.size > 1:
        raise ConfigError(
            f"torchrun has started {world.size} processes, and a run with producers has one driver, which places "
            f"engines and trainers itself: start it once, with -t {world.size} and -i for engines"
        )
    address = os.environ.get("RAY_ADDRESS")
    is_submitted = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    if is_submitted and address and not config.cluster.master_address:
        say(f"joins the Ray cluster of this job (--master_address {address})")
        config = config.with_changes(master_address=address)
    return config
