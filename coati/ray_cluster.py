"""Place trainers and engines on a Ray cluster, as a run does."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from coati.settings import device_of
from coati_rl.config import Config
from coati_rl.config.cli import build_job
from coati_rl.config.plan import resolve_precision
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.members import Members
from coati_rl.processes.ray_environment import prepare_ray_environment
from coati_rl.types import Device
from consumer.environment import trainer_environment
from consumer.joined_rank import JoinedRank
from consumer.trainer_rank import TrainerRank
from producer.engine_member import EngineMember
from producer.engines import engine_environment


class Cluster:
    """Hold the places that are reserved for engines and trainers."""

    def __init__(self, config: Config, device: Device, log_dir: Path) -> None:
        """Reserve them. Raises: ConfigError if the cluster is too small."""
        from coati_rl.runtime.placement_manager import PlacementManager  # imports Ray

        self.device, self.num_trainers = device, config.parallel.num_trainers
        self.address = ""  # of a trainer's first rank, as engines reach it; empty: all are on this machine
        self.takes_turns = config.takes_turns  # engines are on the trainers' devices
        self._config, self._log_dir = config, log_dir
        self._places = PlacementManager(config, device)
        self._taken = set[str]()
        self._engine_places = [self._places.acquire() for _ in range(config.parallel.num_inferencer)]

    def engines(self, config: Config) -> Members:
        """Load an engine in each of its places. Raises: ConfigError for engines of another width."""
        width, own = config.parallel.producer_tensor_parallel_size, self._config.parallel.producer_tensor_parallel_size
        if width != own:
            raise ConfigError(f"producer_tensor_parallel_size={width}: the cluster has places for {own}; tell it, too")
        if self.takes_turns and not config.takes_turns:
            raise ConfigError("the cluster's engines and trainers share devices: make the Engine with colocate=True")
        environment = engine_environment(self.device, width, compiles=config.sampling.enforce_eager is False)
        return self._members(
            "engine", self._engine_places, EngineMember, (config, self.device), config=config, environment=environment
        )

    def trainers(self, config: TrainingConfig, rank: type[JoinedRank] = TrainerRank) -> Members:
        """Make a rank in each of the trainers' places, all in one process group; they hold no model yet."""
        environment = trainer_environment(self._config, self.device)
        ranks = self._members("trainer", self._places.trainers, rank, (), config=config, environment=environment)
        size = ranks.size
        where = ranks.call("open_rendezvous", [(rank, self._config) for rank in range(size)])[0]
        self.address = where.address if self._config.cluster.master_address else ""
        ranks.call("join", [(rank, size, where, config.run.seed, self.device) for rank in range(size)])
        return ranks

    def _members(
        self, name: str, places: Sequence[Any], make: type, arguments: tuple[Any, ...], *, config: TrainingConfig,
        environment: dict[str, str],
    ) -> Members:  # fmt: skip
        from coati_rl.runtime.members import RemoteMembers  # imports Ray

        if name in self._taken:
            raise ConfigError(f"the cluster's places for {name}s are taken: make one Engine and one Trainer on it")
        self._taken.add(name)
        options: dict[str, Any] = {"device": self.device, "environment": environment, "log_dir": self._log_dir}
        return RemoteMembers(name, places, make, arguments, precision=resolve_precision(config, self.device), **options)


@contextmanager
def cluster(
    *, trainers: int = 1, engines: int = 1, device: Literal["auto", "cpu", "cuda"] = "auto", **flags: Any
) -> Iterator[Cluster]:
    """Start Ray on this machine, or join its cluster at `master_address`, for the time of the block.

    Args:
        trainers: processes of a `Trainer`.
        engines: engines of an `Engine`.
        device: of all of them; "auto" is the GPUs of a cluster that is joined.
        flags: of `coati-rl rl` for the cluster: master_address, ray_dir, producer_tensor_parallel_size; colocate=True:
            engines are on the trainers' devices.
    Raises: ConfigError if the cluster is too small or cannot be joined, or Ray was imported before.
    """
    kind = "cuda" if flags.get("master_address") and device == "auto" else device_of(device)
    config = build_job({"num_trainers": trainers, "num_inferencer": engines, **flags}, Config)
    if "ray" in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        raise ConfigError("Ray was imported before coati.cluster: import it later, or set RAY_AUTH_MODE=token")
    prepare_ray_environment(config)
    from coati_rl.runtime.cluster import ray_cluster  # imports Ray, which reads the environment once

    num_gpus = config.num_devices if kind == "cuda" else 0
    with (
        tempfile.TemporaryDirectory(prefix="coati-") as scratch,
        ray_cluster(config, num_cpus=trainers + engines, num_gpus=num_gpus, scratch=Path(scratch)),
    ):
        yield Cluster(config, kind, Path(scratch) / "logs")
