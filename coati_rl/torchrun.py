"""Read what torchrun tells a process that it has started."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunWorld:
    """Hold this process's place among those of torchrun, and where torchrun keeps its store."""

    rank: int
    size: int  # processes, on all machines
    local_size: int  # processes of each machine
    address: str  # of the machine of rank 0
    port: int
    restarts: int  # how often torchrun has started all processes again

    @property
    def is_one_machine(self) -> bool:
        """Whether all processes are on this machine."""
        return self.size == self.local_size


def torchrun_world() -> TorchrunWorld | None:
    """Return the place of this process; None if torchrun has not started it."""
    told = os.environ
    if "TORCHELASTIC_RUN_ID" not in told or "WORLD_SIZE" not in told:
        return None
    return TorchrunWorld(
        rank=int(told["RANK"]),
        size=int(told["WORLD_SIZE"]),
        local_size=int(told["LOCAL_WORLD_SIZE"]),
        address=told["MASTER_ADDR"],
        port=int(told["MASTER_PORT"]),
        restarts=int(told.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def num_local(num_processes: int) -> int:
    """Return how many of a job's processes are on this machine, if torchrun places them or if they are all here."""
    world = torchrun_world()
    return num_processes if world is None else min(num_processes, world.local_size)


def is_one_machine() -> bool:
    """Return False if torchrun has started processes on several machines."""
    world = torchrun_world()
    return world is None or world.is_one_machine
