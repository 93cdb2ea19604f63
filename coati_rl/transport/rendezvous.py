"""Where and as whom a member joins the group of rank 0: made there, handed to each engine and sender as JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Literal, cast

from coati_rl.errors import TransferError
from coati_rl.transport.manifest import parse_object

CollectiveBackend = Literal["gloo", "nccl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """An engine's invitation: tensor-parallel rank r joins as group rank `first_rank + r`; or that of a sender."""

    backend: CollectiveBackend
    epoch: int  # counts the groups that rank 0 has opened
    host: str  # of rank 0's store
    port: int
    world_size: int  # all senders and all ranks of all engines
    first_rank: int
    unique_id: str | None = None  # hexadecimal; nccl only

    def __post_init__(self) -> None:
        if self.backend not in ("gloo", "nccl"):
            raise TransferError(f"rendezvous: unknown backend {self.backend!r}")
        if (self.backend == "nccl") != (self.unique_id is not None):
            raise TransferError(f"rendezvous: backend {self.backend} with unique_id {self.unique_id!r}")
        if not 1 <= self.first_rank < self.world_size:
            raise TransferError(f"rendezvous: first_rank {self.first_rank} in a world of {self.world_size}")

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps({**asdict(self), "unique_id": self.unique_id or ""})

    @staticmethod
    def from_json(text: str) -> "Rendezvous":
        """The inverse of `to_json`. Raises: TransferError on anything else."""
        fields = parse_object(
            text,
            {
                "backend": str,
                "epoch": int,
                "host": str,
                "port": int,
                "world_size": int,
                "first_rank": int,
                "unique_id": str,
            },
            what="rendezvous",
        )
        return Rendezvous(
            backend=cast(CollectiveBackend, fields["backend"]),
            epoch=fields["epoch"],
            host=fields["host"],
            port=fields["port"],
            world_size=fields["world_size"],
            first_rank=fields["first_rank"],
            unique_id=fields["unique_id"] or None,
        )
