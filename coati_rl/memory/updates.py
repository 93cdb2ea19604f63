"""Forecast what weight updates take: a whole model or its adapters alone, and what sending them needs. In bytes."""

from typing import Any, NamedTuple

from coati_rl.config.training import TrainingConfig
from coati_rl.memory.activations import FLOAT32, item_bytes
from coati_rl.memory.adapters import adapter_shape
from coati_rl.memory.model_shape import model_shape
from coati_rl.memory.trainer import Parts, TrainerLayout
from coati_rl.transport.manifest import DEFAULT_BUCKET_BYTES
from coati_rl.transport.rendezvous import CollectiveBackend

_SEGMENT_SETS = 2  # of shared memory, used in turns: `coati_rl.transport.segments`


class UpdateSize(NamedTuple):
    """Hold the bytes of an update, and of its largest tensor."""

    total: int
    largest: int


def update_size(config: TrainingConfig, hf_config: Any, precision: str) -> UpdateSize:
    """Return what engines get of a model: weights in its precision, or adapters in float32 (--lora-sync adapter)."""
    if (spec := config.lora.sent_adapter) is None:
        shape, e = model_shape(hf_config), item_bytes(precision)
        return UpdateSize(total=shape.num_weights * e, largest=shape.largest_tensor * e)
    adapters = adapter_shape(hf_config, spec)
    total = hf_config.num_hidden_layers * adapters.layer_weights
    return UpdateSize(total=total * FLOAT32, largest=adapters.largest_tensor * FLOAT32)


def shared_update(size: UpdateSize, backend: CollectiveBackend) -> Parts:
    """Return the shared memory through which weights travel: two updates, used in turns."""
    return {"weights in shared memory": _SEGMENT_SETS * size.total} if backend == "shm" else {}


def add_sent_weights(
    parts: Parts, host: Parts, backend: CollectiveBackend, layout: TrainerLayout, size: UpdateSize
) -> None:
    """Add what sending weights takes of a trainer's device and of host memory.

    A bucket is sent while the next one is filled, from a tensor that is gathered whole, once in parts and once joined;
    where all is on the GPU its bytes are digested through two pinned buffers. With ipc engines read them from segments
    on the trainer's GPU.

    Args:
        parts: on the device.
        host: in host memory.
        backend: by which weights are sent.
        layout: of the trainers.
        size: of an update.
    """
    if backend == "ipc":
        senders = 1 if layout.is_fully_sharded else layout.pp
        parts["sent weights"] = _SEGMENT_SETS * size.total // senders
        return
    host["sent weights"] = buckets = 2 * DEFAULT_BUCKET_BYTES
    if backend == "nccl":
        parts["sent weights"] = buckets + 2 * size.largest
    else:
        host["sent weights"] += size.largest
