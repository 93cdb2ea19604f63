"""Run several senders of a transfer, those above rank 0 as threads, with the tensors of each pipeline stage."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from coati_rl.transport.manifest import DEFAULT_BUCKET_BYTES, TensorEntry, WeightManifest, dtype_name
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.wire import WeightSender

Named = Sequence[tuple[str, torch.Tensor]]


def announce(stages: Sequence[Named], *, version: int = 1, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> WeightManifest:
    """The stages' tensors one after another, stage s being sent by rank s."""
    entries = [
        TensorEntry(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), sender=sender)
        for sender, stage in enumerate(stages)
        for name, tensor in stage
    ]
    return WeightManifest(policy_version=version, entries=tuple(entries), bucket_bytes=bucket_bytes)


class OtherSenders:
    """Senders 1 and above, each in a thread; they keep their group from one transfer to the next."""

    def __init__(self, invitations: Sequence[Rendezvous]) -> None:
        self.senders = [WeightSender(backend=invitation.backend) for invitation in invitations]
        for sender, invitation in zip(self.senders, invitations, strict=True):
            sender.join(invitation)
        self._pools = [ThreadPoolExecutor(1, f"sender-{rank}") for rank in range(1, len(invitations) + 1)]

    def start(
        self, manifest: WeightManifest, shares: Sequence[Iterable[tuple[str, torch.Tensor]]], *, timeout_s: float = 20.0
    ) -> list["Future[str]"]:
        """Every one begins to send its share; the result is the digest."""
        return [
            pool.submit(sender.send, manifest, share, timeout_s=timeout_s)
            for pool, sender, share in zip(self._pools, self.senders, shares, strict=True)
        ]
