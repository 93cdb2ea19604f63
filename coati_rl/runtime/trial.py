"""Start Ray as a run does, and call a function in one of its processes, to see whether it works on this machine."""

import os
from pathlib import Path

import ray

from coati_rl.config.training import TrainingConfig
from coati_rl.errors import RunError
from coati_rl.runtime.cluster import ray_cluster
from coati_rl.runtime.waits import result

_CALL_S = 30.0


def try_ray(config: TrainingConfig, scratch: Path) -> tuple[str, bool]:
    """Start Ray, call a function, and end it.

    Args:
        config: of a run; the variables of `prepare_ray_environment` are set.
        scratch: short path of a directory, for Ray's sockets.
    Returns: Ray's version, and whether its processes ask for a token.
    Raises: ConfigError, RunError.
    """
    with ray_cluster(config, num_cpus=1, num_gpus=0, scratch=scratch):
        pid = result(ray.remote(num_cpus=0)(_process_id).remote(), timeout_s=_CALL_S)
        if pid == os.getpid():
            raise RunError("Ray called a function in this process instead of one of its own")
        return str(ray.__version__), os.environ.get("RAY_AUTH_MODE") == "token"


def _process_id() -> int:
    return os.getpid()
