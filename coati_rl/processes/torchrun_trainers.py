"""Make trainers of the processes that torchrun has started: the first one runs the driver and invites the others.

They meet in torchrun's store. It has no authentication, so the invitation, with the key of the driver's calls, is a
file of the run directory that this user alone can read, and the store has its path. A process that has read it becomes
a trainer by exec, with the environment that the driver has chosen, as a trainer that the driver starts itself.
"""

import json
import os
import socket
import stat
import sys
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError, PeerLostError
from coati_rl.processes.trainer_process import PROGRAM
from coati_rl.torchrun import TorchrunWorld

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

Job = TypeVar("Job", bound=TrainingConfig)
PREPARATION_S = 4 * 3600.0  # in which the first process has read the data; if it ends, torchrun ends the others
_CONNECT_S, _MEET_S = 60.0, 600.0  # to the store, which is there before the processes; for the other machines
_NOTHING = "-"  # in place of a path: the command has ended without a run


def with_torchrun(config: Job, world: TorchrunWorld) -> Job:
    """Return the configuration with a trainer in each process of torchrun. Raises: ConfigError."""
    trainers, size = config.parallel.num_trainers, world.size
    if size % world.local_size:
        raise ConfigError(
            f"torchrun --nproc-per-node: {size} processes on machines that have {world.local_size} and others; use the "
            "same number on all of them"
        )
    if "num_trainers" in config.parallel.model_fields_set and trainers != size:
        raise ConfigError(f"-t {trainers}: torchrun has started {size} processes, a trainer each; use -t {size}")
    config = config.with_changes(num_trainers=size)
    if config.needs_ray:
        raise ConfigError(
            "torchrun: the job needs Ray (--master_address, or a model that has devices of its own); start it once, "
            f"without torchrun, with -t {size}"
        )
    return config


class TorchrunTrainers:
    """Meet the other processes of torchrun."""

    def __init__(self, world: TorchrunWorld) -> None:
        """Connect to torchrun's store with the first call."""
        self._world = world
        self._prefix = f"coati-rl/{world.restarts}"
        self._invitation: Path | None = None

    @cached_property
    def _store(self) -> "TCPStore":
        from torch._C._distributed_c10d import TCPStore

        world, timeout = self._world, timedelta(seconds=_CONNECT_S)
        return TCPStore(world.address, world.port, is_master=False, wait_for_workers=False, timeout=timeout)

    def address(self) -> str:
        """Return the address of the first process as those of other machines reach it; empty if there are none.

        It is what the second machine makes of MASTER_ADDR: on the first one its own name may stand for 127.0.1.1.
        """
        return "" if self._world.is_one_machine else self._get("address", _MEET_S)

    def invite(self, invitation: str, environments: list[dict[str, str]], run_dir: Path) -> None:
        """Let the others begin.

        Args:
            invitation: of the driver's `CallServer`.
            environments: variables of each process, by rank.
            run_dir: on a disk that all machines share.
        """
        path = run_dir.absolute() / f".torchrun-{self._world.restarts}.json"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump({"invitation": invitation, "environments": environments}, file)
        self._invitation = path
        self._store.set(f"{self._prefix}/invitation", str(path))

    def close(self) -> None:
        """Remove the invitation; processes that still wait for one end."""
        with suppress(RuntimeError):  # torchrun has ended, and its store
            self._store.compare_set(f"{self._prefix}/invitation", "", _NOTHING)
        if self._invitation is not None:
            self._invitation.unlink(missing_ok=True)

    def follow(self, modules: tuple[str, ...]) -> int:
        """Become a trainer once the first process invites. `modules`: that it imports at once.

        Returns: 0 if the command has ended without a run, as after --dry-run.
        """
        world = self._world
        if world.rank == world.local_size:
            self._store.set(f"{self._prefix}/address", socket.gethostbyname(world.address))
        path = self._get("invitation", PREPARATION_S)
        if path == _NOTHING:
            return 0
        read = json.loads(_own_text(Path(path)))
        _become_trainer(world.rank, read["invitation"], read["environments"][world.rank], modules)

    def _get(self, name: str, timeout_s: float) -> str:
        key = f"{self._prefix}/{name}"
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
            return str(self._store.get(key).decode())
        except RuntimeError as error:
            raise PeerLostError(
                f"process {self._world.rank} of torchrun: another one has ended, or told no {name} in {timeout_s:g} s"
            ) from error


def _own_text(path: Path) -> str:
    """Read a file that nobody else may have written. Raises: PeerLostError."""
    try:
        with path.open(encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise PeerLostError(
                    f"{path}: other users may read it or own it; use a --run-dir on a disk that keeps owners and modes"
                )
            return file.read()
    except OSError as error:
        raise PeerLostError(
            f"{path}: {error.strerror}; all machines of torchrun need the same --run-dir, on a disk that they share"
        ) from error


def _become_trainer(rank: int, invitation: str, environment: dict[str, str], modules: tuple[str, ...]) -> NoReturn:
    read_end, write_end = os.pipe()
    os.write(write_end, f"{invitation}\n".encode())
    os.close(write_end)
    os.dup2(read_end, 0)
    command = [sys.executable, "-c", PROGRAM, str(rank), str(os.getppid()), *modules]
    os.execve(sys.executable, command, {**os.environ, **environment})
