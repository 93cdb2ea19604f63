"""Run the engines' ends of a transfer as threads of the test's process."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import Group, join_group
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.staging_memory import HostMemory
from coati_rl.transport.wire import StagedWeights, receive

CPU = torch.device("cpu")


class Receivers:
    """The ranks of some engines that receive, each in a thread; they keep their group from one transfer to the next."""

    def __init__(
        self, invitations: list[Rendezvous], world_sizes: list[int], *, memories: list[HostMemory] | None = None
    ) -> None:
        self._ranks = [
            (invitation, invitation.first_rank + rank)
            for invitation, size in zip(invitations, world_sizes, strict=True)
            for rank in range(1 if invitation.has_one_receiver else size)
        ]
        memories = memories or [HostMemory() for _ in self._ranks]
        self._memories = {rank: memory for (_, rank), memory in zip(self._ranks, memories, strict=True)}
        self._groups: dict[int, Group] = {}
        self._pool = ThreadPoolExecutor(max_workers=len(self._ranks))

    def start(self, manifest: WeightManifest, *, timeout_s: float = 20.0) -> list[Future[StagedWeights]]:
        """Every rank begins to receive. The futures keep the groups open, which a sender would take for dead ones."""
        futures = [self._pool.submit(self._receive, *member, manifest, timeout_s) for member in self._ranks]
        for future in futures:
            future.receivers = self  # type: ignore[attr-defined]
        return futures

    def _receive(self, invitation: Rendezvous, rank: int, manifest: WeightManifest, timeout_s: float) -> StagedWeights:
        deadline = Deadline(timeout_s)
        if rank not in self._groups:
            self._groups[rank] = join_group(invitation, rank=rank, device=CPU, deadline=deadline)
        try:
            return receive(self._groups[rank], manifest, memory=self._memories[rank], deadline=deadline)
        except TransferError as error:
            self._groups.pop(rank).close(str(error))
            self._memories[rank].discard()
            raise

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
