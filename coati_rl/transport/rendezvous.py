"""Describe to a member how to join the group of rank 0: address, rank and secret; sent as JSON."""

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Literal, cast, get_args

from coati_rl.errors import TransferError
from coati_rl.transport.manifest import parse_object

CollectiveBackend = Literal["gloo", "nccl", "shm", "ipc", "file"]
CUDA_BACKENDS: frozenset[CollectiveBackend] = frozenset({"nccl", "ipc"})  # stage on the model's GPU, not on CPU

_OPTIONAL = ("unique_id", "directory")
_RANDOM_HEX = r"([0-9a-f]{2}){16,}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Invite an engine, whose tensor-parallel rank r joins as group rank `first_rank + r`, or a sender."""

    backend: CollectiveBackend
    secret: str = field(repr=False)  # of this group, hexadecimal; a member authenticates with it
    host: str  # of rank 0's store
    port: int
    world_size: int  # all senders, and of all engines the ranks that join
    first_rank: int
    unique_id: str | None = None  # hexadecimal; of nccl, or in the names of shm's segments
    directory: str | None = None  # of this group's files; file only
    sends_deltas: bool = False  # of the file backend: what differs from the group's last update
    has_one_receiver: bool = False  # an engine's first rank alone joins, and stages for all ranks in host memory

    def __post_init__(self) -> None:
        if self.backend not in get_args(CollectiveBackend):
            raise TransferError(f"rendezvous: unknown backend {self.backend!r}")
        if re.fullmatch(_RANDOM_HEX, self.secret) is None:
            raise TransferError("rendezvous: secret is not hexadecimal, or too short")
        if (self.backend in ("nccl", "shm")) != (self.unique_id is not None):
            raise TransferError(f"rendezvous: backend {self.backend} with unique_id {self.unique_id!r}")
        if self.unique_id is not None and re.fullmatch(_RANDOM_HEX, self.unique_id) is None:
            raise TransferError(f"rendezvous: unique_id {self.unique_id!r} is not hexadecimal, or too short")
        if (self.backend == "file") != (self.directory is not None):
            raise TransferError(f"rendezvous: backend {self.backend} with directory {self.directory!r}")
        if not 1 <= self.first_rank < self.world_size:
            raise TransferError(f"rendezvous: first_rank {self.first_rank} in a world of {self.world_size}")

    def to_json(self) -> str:
        """Return one line of JSON."""
        fields = asdict(self)
        return json.dumps(fields | {name: fields[name] or "" for name in _OPTIONAL})

    @staticmethod
    def from_json(text: str) -> "Rendezvous":
        """Parse what `to_json` wrote. Raises: TransferError on anything else."""
        types = {"backend": str, "secret": str, "host": str, "port": int, "world_size": int, "first_rank": int}
        types |= dict.fromkeys(("has_one_receiver", "sends_deltas"), bool)
        fields = parse_object(text, types | dict.fromkeys(_OPTIONAL, str), what="rendezvous")
        return Rendezvous(
            backend=cast(CollectiveBackend, fields["backend"]),
            secret=fields["secret"],
            host=fields["host"],
            port=fields["port"],
            world_size=fields["world_size"],
            first_rank=fields["first_rank"],
            unique_id=fields["unique_id"] or None,
            directory=fields["directory"] or None,
            has_one_receiver=fields["has_one_receiver"],
            sends_deltas=fields["sends_deltas"],
        )
