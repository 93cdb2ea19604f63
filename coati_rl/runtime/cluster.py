"""Ray: started here with our own temporary directory, or joined; and what an actor of ours asks of it."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from coati_rl.config import Config
from coati_rl.errors import ConfigError
from coati_rl.runtime.process import num_threads

logger = logging.getLogger(__name__)

NAMESPACE = "coati-rl"
_OBJECT_STORE_BYTES = 512 * 2**20  # groups and batches are small; Ray would take a third of the memory


@contextmanager
def ray_cluster(config: Config, *, num_cpus: int, num_gpus: int, scratch: Path) -> Iterator[None]:
    """Ray for the time of a run: joined when --master_address is given, else started on this machine and ended.

    Args:
        num_cpus: logical, when Ray is started here.
        num_gpus: that the run needs.
        scratch: for the sockets and logs of a Ray started here, unless --ray_dir is given.
    Raises: ConfigError if the cluster cannot be joined or lacks the devices.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if config.master_address:
            _join(config, num_gpus)
        else:
            ray.init(
                address="local",
                num_cpus=num_cpus,  # logical: actors are pinned to real cores by themselves
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                namespace=NAMESPACE,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level=logging.CRITICAL,
                _temp_dir=str(Path(config.ray_dir).absolute() if config.ray_dir else scratch),
                _node_ip_address="127.0.0.1",
            )
        for number, handler in handlers.items():  # Ray puts its own there, which abort the driver
            signal.signal(number, handler)
        yield
    finally:
        ray.shutdown()


def _join(config: Config, num_gpus: int) -> None:
    address = config.master_address or ""
    address = address if ":" in address else f"{address}:6379"
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--master_address {address}: no Ray cluster answers; `ray start --head` there first"
        ) from error
    available = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    if available < num_gpus:
        raise ConfigError(
            f"the cluster at {address} has {available} GPUs, P * ptp + T = {num_gpus} are needed: "
            f"lower -i ({config.num_inferencer}), -ptp ({config.producer_tensor_parallel_size}) "
            f"or -t ({config.num_trainers}), or add nodes"
        )


def own_address(config: Config) -> str:
    """The address at which other actors of the run reach this process's machine; in an actor, its own node's."""
    if not config.master_address:
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def actor_options(*, name: str, num_gpus: int, num_slots: int, environment: dict[str, str]) -> dict[str, Any]:
    """Ray's options for a producer or a trainer.

    Args:
        name: unique in the run.
        num_gpus: 0 on a CPU.
        num_slots: actors that share the machine's cores.
        environment: variables that must be set before the process starts.
    """
    threads = str(num_threads(num_slots))
    return {
        "name": name,
        "namespace": NAMESPACE,
        "num_cpus": 1,
        "num_gpus": num_gpus,
        "max_restarts": 0,  # the supervisor replaces actors: a restarted one would hold the start weights unnoticed
        "max_concurrency": 16,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", **environment}},
    }
