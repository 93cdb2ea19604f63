"""Environment variables that Ray reads once, when it is imported; hence a module that does not import it."""

import os
import secrets

from coati_rl.config import Config


def prepare_ray_environment(config: Config) -> None:
    """Set what the run needs of Ray; call before anything imports it. What the user has set stays.

    Token authentication stays on. A Ray of our own gets a token of its own, in memory alone; a cluster that is joined
    has one already, where `ray start` put it. A Ray of our own listens on 127.0.0.1 alone.
    """
    settings = {
        "RAY_AUTH_MODE": "token",  # the default, but a driver that joins by address sends no token unless told (2.60)
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        # A driver's empty GPU list must not reach the actors of a cluster that has GPUs.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if not config.cluster.master_address:
        # Ray's name for "clusters of several machines are possible"; without it all of its servers bind to loopback.
        settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            settings["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    for name, value in settings.items():
        os.environ.setdefault(name, value)
