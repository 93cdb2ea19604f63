"""Start Ray with a private temporary directory, or join a cluster, and give actors their Ray options."""

import logging
import secrets
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import AuthenticationError

from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError, RunError
from coati_rl.processes.interrupts import blocked_in_children, ending_signals
from coati_rl.processes.ray_environment import SESSION, actor_environment, check_session_path

logger = logging.getLogger(__name__)

_IS_LATE = "timed out during startup"  # Ray's node.py, after 30 s that no setting changes
_END_S = 10.0  # for killed processes to end
_OBJECT_STORE_BYTES = 512 * 2**20  # groups and batches are small; Ray would take a third of the memory


@contextmanager
def ray_cluster(config: TrainingConfig, *, num_cpus: int, num_gpus: int, scratch: Path) -> Iterator[None]:
    """Provide Ray for a run: join a cluster when --master_address is given, else start one here and end it.

    Args:
        num_cpus: logical, when Ray is started here.
        num_gpus: likewise.
        scratch: of the run, with mode 0700; a Ray started here has its sockets and logs below it, or --ray_dir.
    Raises: ConfigError if the cluster cannot be joined, or Ray cannot use --ray_dir or TMPDIR; RunError if Ray does
        not start.
    """
    handlers = {number: signal.getsignal(number) for number in ending_signals()}
    try:
        if config.cluster.master_address:
            _join(config.cluster.master_address)
        else:
            _start(_session_path(config, scratch), num_cpus=max(num_cpus, config.num_devices), num_gpus=num_gpus)
        for number, handler in handlers.items():  # Ray installs its own, which abort the driver
            signal.signal(number, handler)
        yield
    finally:
        ray.shutdown()


def _start(session: Path, *, num_cpus: int, num_gpus: int) -> None:
    """Start Ray here, twice if it was late the first time: it gives its processes 30 s. Raises: RunError."""
    for is_last in (False, True):
        try:
            with blocked_in_children():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,  # logical: actors pin themselves to real cores
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    namespace=_new_namespace(),
                    object_store_memory=_OBJECT_STORE_BYTES,
                    logging_level=logging.CRITICAL,
                    _temp_dir=str(session),
                    _node_ip_address="127.0.0.1",
                    # Idle workers, which actors with variables of their own never become.
                    _system_config={"prestart_worker_first_driver": False},
                )
            return
        except Exception as error:  # a plain Exception if one of its processes is late, as on a busy machine
            _end_what_is_left(session)
            if is_last or _IS_LATE not in str(error):
                raise RunError(
                    f"Ray did not start on this machine: {' '.join(str(error).split())}; try again when the machine is "
                    "less busy, or give --ray_dir and read Ray's logs there"
                ) from error
            logger.warning("Ray was not ready within the 30 s that it gives itself; it is started once more")


def _end_what_is_left(session: Path) -> None:
    """Kill what a Ray that did not start has left; it knows of it no more itself."""
    left = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any(str(session) in argument for argument in process.cmdline()):
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=_END_S)


def _session_path(config: TrainingConfig, scratch: Path) -> Path:
    """Choose the directory of Ray's sessions, below a private one: Ray creates it with mode 0777."""
    check_session_path(scratch)
    session = scratch / SESSION
    if config.cluster.ray_dir is not None:
        session.symlink_to(_make_private(Path(config.cluster.ray_dir).absolute()) / "ray")
        session.readlink().mkdir()
    return session


def _make_private(directory: Path) -> Path:
    """Create a private directory (mode 0700) for this run below --ray_dir. It is not removed.

    Raises: ConfigError if it cannot be created, or if other users could replace it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        mode = directory.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"--ray_dir {directory}: every user may replace its content (mode {stat.S_IMODE(mode):04o}): "
                f"`chmod o-w {directory}`, or use another directory"
            )
        return Path(tempfile.mkdtemp(prefix="coati-", dir=directory))
    except OSError as error:
        raise ConfigError(f"--ray_dir {directory}: cannot be written: {error.strerror}; use another one") from error


def _join(master_address: str) -> None:
    address = master_address if ":" in master_address else f"{master_address}:6379"
    try:
        ray.init(address=address, namespace=_new_namespace(), log_to_driver=False, logging_level=logging.CRITICAL)
    except AuthenticationError as error:
        raise ConfigError(
            f"--master_address {address}: the Ray cluster refuses this machine's token; copy the head's "
            "~/.ray/auth_token here, or give its path in RAY_AUTH_TOKEN_PATH"
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--master_address {address}: no Ray cluster answers, or this machine is not one of its nodes; "
            f"`ray start --head` there first, and `ray start --address={address}` here"
        ) from error


def _new_namespace() -> str:
    """Return a new namespace for this run's actor names: several runs may share a cluster."""
    return f"coati-rl-{secrets.token_hex(4)}"


def own_namespace() -> str:
    """Return the Ray namespace in which the run's actors find each other by name."""
    return str(ray.get_runtime_context().namespace)


def actor_options(*, name: str, num_threads: int, environment: dict[str, str]) -> dict[str, Any]:
    """Return Ray's options for a producer or a trainer, except those of its reservation.

    Args:
        name: unique in the run.
        num_threads: its part of its node's cores; with more, processes are many times slower.
        environment: variables that must be set before the process starts.
    """
    return {
        "name": name,
        "max_restarts": 0,  # the supervisor replaces actors: a restarted one would hold the start weights unnoticed
        "max_concurrency": 16,
        "runtime_env": {
            "env_vars": {
                **{"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"},
                **actor_environment(),
                **environment,
            }
        },
    }
