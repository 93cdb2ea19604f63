"""Receive a weight update beside the serving weights, on a thread of its own, while generation continues.

In: a manifest and an invitation. Out, by polling: the staged tensors, or the error. One per tensor-parallel rank. Where
one rank receives for all, the others map its memory, and each loads its shard from there.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from coati_rl.errors import EngineError, TransferError
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import Group, join_group
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import CUDA_BACKENDS, Rendezvous
from coati_rl.transport.staging_memory import GpuMemory, HostMemory, StagingMemory
from coati_rl.transport.wire import StagedWeights, map_received, receive

_cuda: Any = torch.cuda  # whose streams have no type annotations


class StagingArea:
    """Hold at most one staged update, its memory, and its transfer group for the next update.

    On a GPU the transfer has a stream of its own, so that it does not wait behind steps of the model. What is staged is
    read by other streams from `take` on.
    """

    def __init__(self, *, device: torch.device, tensor_parallel_rank: int = 0) -> None:
        """Start empty; `device` is the model's."""
        self._device = device
        self._tensor_parallel_rank = tensor_parallel_rank
        self._group: Group | None = None
        self._rendezvous: Rendezvous | None = None  # of the group
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._host_memory: HostMemory | None = None
        self._stream: Any = None  # of the transfers, on a GPU
        self._staged: StagedWeights | None = None
        self._error: TransferError | None = None

    def start(
        self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float, shared: str | None = None
    ) -> None:
        """Start receiving; drops a staged update. One that was taken must be loaded (see `BucketTransport`).

        Args:
            manifest: of the update.
            rendezvous: of the engine.
            timeout_s: of the transfer.
            shared: path of the memory of all ranks of the engine, if it has several and one receives for all.
        """
        if self._thread is not None and self._thread.is_alive() and self._staged is None and self._error is None:
            raise EngineError("a weight update is already being received")
        self._staged = self._error = None
        deadline = Deadline(timeout_s, cancelled=self._cancelled)
        self._thread = threading.Thread(
            target=self._run, args=(manifest, rendezvous, shared, deadline), name="weight-receiver", daemon=True
        )
        self._thread.start()

    def poll(self) -> StagedWeights | None:
        """Return the staged update; None while it is being received. Raises: TransferError if the transfer failed."""
        if self._error is not None:
            raise self._error
        return self._staged

    def take(self) -> StagedWeights:
        """Remove and return the staged update, for this thread's stream. Raises: EngineError if there is none."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise EngineError("no weight update is staged")
        if self._stream is not None:
            current = _cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for _, tensor in staged.tensors:
                if tensor.is_cuda:  # freed after the commit, its memory is not used again before this stream is there
                    tensor.record_stream(current)
        return staged

    def release(self) -> None:
        """Give the memory of transfers back, and leave the group; for the next update there is another one."""
        self._leave(None)
        self._discard()

    def close(self) -> None:
        """End a running transfer and leave the group."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._leave(None)

    def _run(self, manifest: WeightManifest, rendezvous: Rendezvous, shared: str | None, deadline: Deadline) -> None:
        try:
            with self._own_stream():
                self._staged = self._receive(manifest, rendezvous, shared, deadline)
        except TransferError as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001  (reported by `poll`; usually out of memory)
            self._give_up(
                TransferError(f"receiving version {manifest.policy_version}: {type(error).__name__}: {error}")
            )

    def _receive(
        self, manifest: WeightManifest, rendezvous: Rendezvous, shared: str | None, deadline: Deadline
    ) -> StagedWeights:
        memory = self._memory(rendezvous, shared)
        if rendezvous.has_one_receiver and self._tensor_parallel_rank > 0:
            if shared is None:
                raise EngineError("no shared memory: another rank receives the update")
            return map_received(manifest, memory=memory, deadline=deadline)
        if self._group is None or self._rendezvous != rendezvous:
            self._leave(None)
            rank = rendezvous.first_rank + self._tensor_parallel_rank
            self._group = join_group(rendezvous, rank=rank, device=self._device, deadline=deadline)
            self._rendezvous = rendezvous
        return receive(self._group, manifest, memory=memory, deadline=deadline)

    def _memory(self, rendezvous: Rendezvous, shared: str | None) -> StagingMemory:
        """Return the memory of the update: of the model's GPU, or of the host, from which loading copies shards."""
        if rendezvous.backend in CUDA_BACKENDS and not rendezvous.has_one_receiver:
            return GpuMemory(self._device)
        if self._host_memory is None or not self._host_memory.is_of(shared):
            self._discard()
            self._host_memory = HostMemory(shared, reader=self._device)
        return self._host_memory

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Have this thread's work on the GPU in the transfers' stream, which is done at the end."""
        if self._device.type != "cuda":
            yield
            return
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = _cuda.Stream(self._device)
            with _cuda.stream(self._stream):
                yield
            self._stream.synchronize()

    def _give_up(self, error: TransferError) -> None:
        self._leave(str(error))
        self._discard()
        self._error = error

    def _discard(self) -> None:
        memory, self._host_memory = self._host_memory, None
        if memory is not None:
            memory.discard()

    def _leave(self, reason: str | None) -> None:
        group, self._group, self._rendezvous = self._group, None, None
        if group is not None:
            group.close(reason)
