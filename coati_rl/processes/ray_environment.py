"""Set the environment variables that Ray reads once, when it is imported, and check where it will have its sockets.

This module does not import Ray.
"""

import os
import secrets
from pathlib import Path

from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError

SESSION = "ray"  # directory of Ray's sessions, below a run's scratch directory
_MAX_SESSION_PATH = 43  # characters: Ray's sockets are up to 64 further on, and the kernel takes 107 in all

# The largest argument or result, in bytes, that Ray sends in the call itself rather than through its object store.
_INLINE_LIMIT = "RAY_max_direct_call_object_size"
_MAX_INLINE_BYTES = 2**19  # Ray's is 100 KiB; of 600 to 850 KB the object store is as fast, see docs/performance.md

# Otherwise each process of a run imports pyarrow (25 MiB), of whose tables none goes through Ray here.
_WITHOUT_ARROW = (
    "RAY_DISABLE_CUSTOM_ARROW_DATA_SERIALIZATION",
    "RAY_DISABLE_CUSTOM_ARROW_JSON_OPTIONS_SERIALIZATION",
)


def prepare_ray_environment(config: TrainingConfig) -> None:
    """Set the variables that the run needs; call before anything imports Ray. Variables set by the user stay.

    Token authentication stays on. A Ray started by the run gets a new token, held in memory only, and listens on
    127.0.0.1 alone; a cluster that is joined has a token already, written by `ray start`.
    """
    settings = {
        "RAY_AUTH_MODE": "token",  # the default, but a driver that joins by address sends no token without it (2.60)
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        # A driver's empty GPU list must not reach the actors of a cluster that has GPUs.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **actor_environment(),
    }
    if not config.cluster.master_address:
        # Ray's name for "clusters of several machines are possible"; without it all of its servers bind to loopback.
        settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            settings["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def check_session_path(scratch: Path) -> None:
    """Raise ConfigError if the sockets of a Ray started below `scratch` would have paths that the kernel refuses."""
    if len(str(scratch / SESSION)) > _MAX_SESSION_PATH:
        most = _MAX_SESSION_PATH - len(f"/{scratch.name}/{SESSION}")
        raise ConfigError(
            f"TMPDIR {scratch.parent}: too long for the paths of Ray's sockets, which leave it {most} characters; "
            "set TMPDIR=/tmp"
        )


def actor_environment() -> dict[str, str]:
    """Return the settings that an actor's process needs, too: in a cluster that is joined it does not inherit them."""
    settings = {_INLINE_LIMIT: str(_MAX_INLINE_BYTES), **dict.fromkeys(_WITHOUT_ARROW, "1")}
    return {name: os.environ.get(name, value) for name, value in settings.items()}
