"""A trainer rank's part in a weight sync, by its place: rank 0 directs, the head of each other stage sends its stage's
weights, the ranks with the other shards take part in gathering them, further data-parallel copies do nothing.
"""

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from coati_rl.config import Config
from coati_rl.data.work import SyncReport, SyncWork
from coati_rl.protocols import WeightReceiver
from coati_rl.transport.manifest import TensorEntry, WeightManifest, dtype_name
from coati_rl.transport.wire import WeightSender
from consumer.process_group import collective
from consumer.torch_backend import TorchBackend
from consumer.train_loop import Publish
from consumer.weight_publisher import StageSender, WeightPublisher, Weights


def make_publish(
    backend: TorchBackend, config: Config, connect: Callable[[int], WeightReceiver], *, host: str
) -> Publish:
    """What this rank does at a sync.

    Args:
        backend: of the weights.
        config: the run's.
        connect: producer id to its remote end.
        host: this process's address, as producers and other trainers reach it.
    """
    layout, device = backend.layout, backend.device
    if not layout.is_stage_head:
        return _take_part
    sender = WeightSender(backend="nccl" if device.type == "cuda" else "gloo", host=host, device=device)
    if not layout.is_first_stage:
        stage_sender = StageSender(sender, lambda: _hear(backend), rank=layout.stage)

        def send(work: SyncWork, weights: Weights) -> None:
            stage_sender.take_part(weights)

        return send
    return WeightPublisher(
        sender,
        connect,
        lambda version: make_manifest(backend, version),
        ranks_per_producer=config.producer_tensor_parallel_size,
        timeout_s=config.sync_timeout_s,
        drain_timeout_s=config.stall_timeout_s,
        num_senders=layout.num_stages,
        announce=lambda text: _announce(backend, text),
    ).publish


def make_manifest(backend: TorchBackend, version: int) -> WeightManifest:
    """What all stages together send, in Hugging Face order."""
    dtype = dtype_name(backend.config.wire_dtype)
    entries = (TensorEntry(name=i.name, dtype=dtype, shape=i.shape, sender=i.stage) for i in backend.infos)
    return WeightManifest(policy_version=version, entries=tuple(entries))


def _take_part(work: SyncWork, weights: Weights) -> SyncReport | None:
    deque(weights, maxlen=0)
    return None


def _announce(backend: TorchBackend, text: str) -> None:
    """Rank 0: a text to the heads of the other stages."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=backend.device)
    _broadcast(backend, torch.tensor(len(data), device=backend.device))
    _broadcast(backend, data)


def _hear(backend: TorchBackend) -> str:
    length = torch.zeros((), dtype=torch.int64, device=backend.device)
    _broadcast(backend, length)
    data = torch.empty(int(length), dtype=torch.uint8, device=backend.device)
    _broadcast(backend, data)
    return bytes(data.tolist()).decode()


def _broadcast(backend: TorchBackend, data: torch.Tensor) -> None:
    if backend.layout.pp_group is not None:
        with collective("agree on a weight sync"):
            dist.broadcast(data, src=0, group=backend.layout.pp_group)
