"""Receive a weight update beside the serving weights, on a thread of its own, while generation continues.

In: a manifest and an invitation. Out, by polling: the staged tensors, or the error. One per tensor-parallel rank.
"""

import threading

import torch

from coati_rl.errors import EngineError, TransferError
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import Group, join_group
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import CUDA_BACKENDS, Rendezvous
from coati_rl.transport.wire import StagedWeights, receive


class StagingArea:
    """Hold at most one staged update, and its transfer group for the next update."""

    def __init__(self, *, device: torch.device, tensor_parallel_rank: int = 0) -> None:
        """Start empty; tensors are staged on `device`, the model's, if the transport backend supports it."""
        self._device = device
        self._tensor_parallel_rank = tensor_parallel_rank
        self._group: Group | None = None
        self._rendezvous: Rendezvous | None = None  # of the group
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._staged: StagedWeights | None = None
        self._error: TransferError | None = None

    def start(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        """Start receiving; drops a staged update. One that was taken must be loaded (see `BucketTransport`)."""
        if self._thread is not None and self._thread.is_alive() and self._staged is None and self._error is None:
            raise EngineError("a weight update is already being received")
        self._staged = self._error = None
        deadline = Deadline(timeout_s, cancelled=self._cancelled)
        self._thread = threading.Thread(
            target=self._receive, args=(manifest, rendezvous, deadline), name="weight-receiver", daemon=True
        )
        self._thread.start()

    def poll(self) -> StagedWeights | None:
        """Return the staged update; None while it is being received. Raises: TransferError if the transfer failed."""
        if self._error is not None:
            raise self._error
        return self._staged

    def take(self) -> StagedWeights:
        """Remove and return the staged update. Raises: EngineError if there is none."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise EngineError("no weight update is staged")
        return staged

    def close(self) -> None:
        """End a running transfer and leave the group."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._leave(None)

    def _receive(self, manifest: WeightManifest, rendezvous: Rendezvous, deadline: Deadline) -> None:
        try:
            if self._group is None or self._rendezvous != rendezvous:
                self._leave(None)
                rank = rendezvous.first_rank + self._tensor_parallel_rank
                self._group = join_group(rendezvous, rank=rank, device=self._device, deadline=deadline)
                self._rendezvous = rendezvous
            # Other backends stage in host memory; loading copies the tensors to the model's device.
            device = self._device if rendezvous.backend in CUDA_BACKENDS else torch.device("cpu")
            self._staged = receive(self._group, manifest, device=device, deadline=deadline)
        except TransferError as error:
            self._leave(str(error))
            self._error = error
        except Exception as error:  # noqa: BLE001  (reported by `poll`; usually out of memory)
            self._leave(str(error))
            self._error = TransferError(f"receiving version {manifest.policy_version}: {type(error).__name__}: {error}")

    def _leave(self, reason: str | None) -> None:
        group, self._group, self._rendezvous = self._group, None, None
        if group is not None:
            group.close(reason)
