"""Join the ranks of a trainer of one's own program, send their weights, and take what they hold off the device."""

import socket
from collections.abc import Sequence

import torch

from coati_rl.config.training import TrainingConfig
from coati_rl.runtime.address import own_address
from coati_rl.types import Device
from consumer.offloaded_parts import OffloadedParts
from consumer.parallel.process_group import init_process_group, open_listener, private_store_location
from consumer.parallel.store_location import StoreLocation
from consumer.weight_sync.rank_sender import RankSender

TIMEOUT_S = 600.0  # of a collective


class JoinedRank:
    """Serve as base of a rank, in a process of its own or in one that has joined the others.

    What it holds sets `_sender` and `_offloaded_parts`.
    """

    _sender: RankSender
    _offloaded_parts: OffloadedParts

    def __init__(self, device: torch.device | None = None) -> None:
        """Hold nothing yet. `device`: of a process that has an engine, too; None until `join`."""
        self._device, self.shares_process = device, device is not None
        self._listener: socket.socket | None = None

    def open_rendezvous(self, rank: int, cluster: TrainingConfig) -> StoreLocation | None:
        """Create the store through which the ranks find each other; on the first one only."""
        if rank > 0:
            return None
        if not cluster.cluster.master_address:
            return private_store_location("127.0.0.1")
        self._listener = open_listener(own_address(cluster))
        address, port = self._listener.getsockname()[:2]
        return StoreLocation(address=address, port=int(port))

    def join(self, rank: int, size: int, where: StoreLocation, seed: int, device: Device) -> None:
        """Join the other ranks' process group."""
        self._device = init_process_group(
            rank=rank,
            world_size=size,
            rendezvous=where,
            listener=self._listener,
            timeout_s=TIMEOUT_S,
            seed=seed,
            device=device,
        )

    @property
    def device(self) -> torch.device:
        """Return the device that this rank computes on."""
        if self._device is None:
            raise ValueError("this rank has not joined the others")
        return self._device

    @property
    def kind(self) -> Device:
        """Return the kind of device."""
        return "cuda" if self.device.type == "cuda" else "cpu"

    def open(self, number: int, sizes: Sequence[int], policy_version: int) -> tuple[str, list[str], list[str]] | None:
        """See `RankSender.open`."""
        return self._sender.open(number, sizes, policy_version)

    def send(self, manifest: str, senders: Sequence[str], timeout_s: float) -> str:
        """See `RankSender.send`."""
        return self._sender.send(manifest, senders, timeout_s)

    def cpu(self, parts: Sequence[str]) -> None:
        """Take parts of what is held off the device; see `OffloadedParts`."""
        self._offloaded_parts.offload(parts)

    def cuda(self, parts: Sequence[str]) -> None:
        """Bring parts back; engines have taken what was sent, whose memory is given up."""
        self._sender.close()
        self._offloaded_parts.onload(parts)
