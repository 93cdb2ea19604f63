"""Forecast the memory of a trainer rank on the device that it computes on: parts by name, at the largest moment.

A step has few moments at which most memory is in use: the end of a micro-batch's forward, when the loss has been
computed and all activations are kept; the end of its backward, when gradients of the embedding are added; the sum of
gradients over ranks; and the optimizer's step. The forecast is the largest of them. Bytes throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coati_rl.memory.activations import (
    FLOAT32,
    MicroBatchSize,
    adapter_heap_bytes,
    backward_bytes,
    head_bytes,
    heap_bytes,
    item_bytes,
    kept_bytes,
    layer_bytes,
    layer_input_bytes,
)
from coati_rl.memory.adapters import AdapterShape
from coati_rl.memory.model_shape import ModelShape
from coati_rl.types import Device

Parts = dict[str, int]  # bytes by name

HEAP = "heap"  # the part that is assumed, not counted: see `heap_bytes`

BUCKET_BYTES = 2**26  # of a sum of gradients over ranks: `consumer.parallel.gradient_reduction`
ADAM_MOMENTS = 2  # float32 numbers a parameter
_OFFLOADED = ("masters", "optimizer")  # parts that --offload optimizer takes away between two steps
_RESTING = ("parameters", "base", *_OFFLOADED)  # of a trained model, between two steps
_HELD = (*_RESTING, "gradients")  # and while another one computes


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLayout:
    """Hold how a model is trained: layout, precision, and what a step consists of."""

    precision: str  # fp32 or bf16
    device: Device = "cpu"
    plugin: str = "hybrid"
    dp: int = 1  # copies of the weights, those of context-parallel ranks among them; with FSDP2 ranks that share them
    fsdp_copies: int = 1  # that FSDP2 has of the weights, each on `dp` ranks
    pp: int = 1
    ep: int = 1  # ranks that share the experts of a layer out
    zero_stage: int = 0  # 0 with one data-parallel rank
    gradient_checkpointing: bool = False
    offloads_activations: bool = False  # what layers begin with waits in host memory
    has_several_micro_batches: bool = True  # in a step, so that gradients are held while activations are
    adam_moments: int = ADAM_MOMENTS  # of the optimizer's states; 0: unknown
    adapters: AdapterShape | None = None  # trained in place of the weights
    gathered_keys: int = 0  # bytes of keys and values that context-parallel ranks gather at a time
    offloads_optimizer: bool = False  # masters and moments are on the device in the optimizer's step alone
    takes_turns: bool = False  # engines have the device while they answer prompts, and models are elsewhere

    @property
    def is_fully_sharded(self) -> bool:
        """Whether weights are sharded over all trainers (FSDP2)."""
        return self.plugin == "fsdp2"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModel:
    """Hold a frozen model that a rank scores with."""

    shape: ModelShape  # of a tensor-parallel rank's part
    num_bytes: int  # of its weights on this rank
    is_away: bool = False  # they are on the device while it scores, and at no other time


def trainer_parts(
    shape: ModelShape, size: MicroBatchSize, layout: TrainerLayout, *, scored: Sequence[FrozenModel] = ()
) -> Parts:
    """Return the largest rank's memory of a step, without the weights of frozen models that are always there.

    Args:
        shape: of a tensor-parallel rank's part of the model.
        size: of the largest micro-batch.
        layout: of the trainers.
        scored: frozen models, of any size, which score micro-batches one after the other.
    """
    moments = _moments(shape, size, layout)
    held = {name: moments[0][name] for name in _HELD if name in moments[0]}
    moments += [held | parts for model in scored for parts in _scoring_parts(model, size, layout)]
    largest = max(moments, key=lambda each: sum(each.values()))
    # FSDP2's processes on the CPU return to the system what they free: `consumer.environment`.
    if layout.device == "cpu" and layout.adapters is not None and not layout.is_fully_sharded:
        largest[HEAP] = adapter_heap_bytes(
            layout.precision, kept=moments[1]["activations"], is_one=not layout.has_several_micro_batches
        )
    elif layout.device == "cpu" and layout.has_several_micro_batches and not layout.is_fully_sharded:
        layers = 1 if layout.gradient_checkpointing else -(-shape.num_layers // layout.pp)
        kept = moments[1]["activations"]
        largest[HEAP] = heap_bytes(shape, size, layout.precision, kept=kept, layers=layers)
    return largest


def _scoring_parts(model: FrozenModel, size: MicroBatchSize, layout: TrainerLayout) -> list[Parts]:
    """Return what a frozen model takes in its layers, and in its LM head: one layer's activations, the last output."""
    shape, away = model.shape, {"frozen models": model.num_bytes} if model.is_away else {}
    root, layer = _gathered_bytes(shape, layout) if layout.is_fully_sharded else (0, 0)
    activations = layer_bytes(shape, size, layout.precision, layout.device)
    output = layer_input_bytes(shape, size, layout.precision)
    head = head_bytes(shape, size, layout.precision, layout.device, is_trained=False)
    return [
        {**away, "activations": activations, "gathered": root + 3 * layer},
        {**away, "activations": output, "LM head": head, "gathered": root},
    ]


def trained_bytes(shape: ModelShape, size: MicroBatchSize, layout: TrainerLayout) -> int:
    """Return what the largest rank holds of a trained model while another one computes."""
    parts = trainer_parts(shape, size, layout)
    away = _OFFLOADED if layout.offloads_optimizer else ()
    return sum(parts.get(name, 0) for name in _HELD if name not in away)


def offloaded_bytes(shape: ModelShape, size: MicroBatchSize, layout: TrainerLayout) -> int:
    """Return what the largest rank keeps of a trained model elsewhere, at the time when it is most."""
    held = _moments(shape, size, layout)[-1]
    names = _RESTING if layout.takes_turns else _OFFLOADED if layout.offloads_optimizer else ()
    num_bytes = sum(held.get(name, 0) for name in names)
    if layout.offloads_activations:
        in_flight = layout.pp if layout.has_several_micro_batches else 1
        layers = in_flight * -(-shape.num_layers // layout.pp)
        num_bytes += layers * layer_input_bytes(shape, size, layout.precision)
    return num_bytes


def _moments(shape: ModelShape, size: MicroBatchSize, layout: TrainerLayout) -> list[Parts]:
    """Return the parts at each moment of a step; with `offloads_optimizer` the optimizer's is the last one."""
    moments = (_sharded_parts if layout.is_fully_sharded else _replicated_parts)(shape, size, layout)
    if not layout.offloads_optimizer:
        return moments
    in_step = {name: moments[2][name] for name in _HELD if name in moments[2]}
    return [*({name: each[name] for name in each if name not in _OFFLOADED} for each in moments), in_step]


def _replicated_parts(shape: ModelShape, size: MicroBatchSize, layout: TrainerLayout) -> list[Parts]:
    """Return the parts at each moment of a step where each data-parallel rank holds the weights.

    The gradient of the LM head's weight is float32[V, H]. It is added to the others at the start of the backward, or if
    the weight is the embedding's too, when the embedding's own gradient, as large, is there.
    """
    layers = -(-shape.num_layers // layout.pp)
    weights = layers * shape.layer_weights + (shape.root_weights if layout.pp == 1 or shape.is_tied else 0)
    if layout.pp > 1 and not shape.is_tied:
        weights += max(shape.embedding_weights, shape.head_weights)
    shards, adapters, e = layout.dp if layout.zero_stage else 1, layout.adapters, item_bytes(layout.precision)
    trained = weights if adapters is None else adapters.trained_weights(shape, layers)
    held = {
        "parameters": trained * e,
        "masters": 0 if layout.precision == "fp32" else -(-trained * FLOAT32 // shards),
        "optimizer": -(-trained * FLOAT32 * layout.adam_moments // shards),
    }
    if adapters is not None:
        held["base"] = adapters.base_bytes(weights, layers, e)
    gradients = trained * FLOAT32
    before = gradients if layout.has_several_micro_batches else 0
    if layout.zero_stage == 2:
        before = gradients = gradients // shards + BUCKET_BYTES
    head_gradient = FLOAT32 * shape.vocabulary * shape.hidden if adapters is None else 0
    kept = _kept_bytes(shape, size, layout, layers)
    # Micro-batches whose backward has not begun: as many as stages on the first one, one on the last, with the head.
    on_first = kept * (layout.pp if layout.has_several_micro_batches else 1)
    head = head_gradient + head_bytes(shape, size, layout.precision, layout.device, is_trained=adapters is None)
    backward = (head_gradient if shape.is_tied else 0) + backward_bytes(shape, size, layout.precision)
    backward += layout.gathered_keys
    if adapters is not None:
        backward += adapters.largest_quantized * e
    embedding_gradient = 0 if adapters is not None else shape.embedding_weights * e
    if layout.precision == "bf16" and adapters is None:
        embedding_gradient += shape.embedding_weights * FLOAT32  # converted before it is added
    moments: list[Parts] = [
        {**held, "gradients": before, "activations": kept, "LM head": head},
        {**held, "gradients": before, "activations": on_first, "backward": backward},
        {
            **held,
            "gradients": gradients,
            "backward": embedding_gradient + (head_gradient if shape.is_tied else 0),
        },
    ]
    if layout.dp > 1:
        largest = shape.largest_tensor if adapters is None else adapters.largest_tensor
        communication = _communication(trained * FLOAT32, largest * FLOAT32, layout)
        moments.append({**held, "gradients": gradients, "communication": communication})
    return moments


def _communication(gradients: int, largest: int, layout: TrainerLayout) -> int:
    """Return the bytes of a sum of gradients over copies of the model. `largest`: bytes of the largest one."""
    bucket = min(gradients, max(BUCKET_BYTES, largest))
    if not layout.zero_stage:
        return bucket
    # Padded gradients, joined ones, this rank's slice of their sum; and gloo's own copy, or the slices of all.
    own = bucket // layout.dp
    return 2 * bucket + own + (bucket if layout.device == "cpu" else own)


def _kept_bytes(shape: ModelShape, size: MicroBatchSize, layout: TrainerLayout, layers: int) -> int:
    """Return the activations that the backward of so many layers needs."""
    return kept_bytes(
        shape,
        size,
        layout.precision,
        layout.device,
        layers=layers,
        is_recomputed=layout.gradient_checkpointing,
        is_offloaded=layout.offloads_activations,
        adapters=layout.adapters,
    )


def _gathered_bytes(shape: ModelShape, layout: TrainerLayout) -> tuple[int, int]:
    """Return what FSDP2 gathers outside of the decoder layers, and of one of them; no experts of other ranks."""
    layer, e = shape.layer_weights - shape.expert_weights * (layout.ep - 1) // layout.ep, item_bytes(layout.precision)
    return shape.root_weights * e, layer * e


def _sharded_parts(shape: ModelShape, size: MicroBatchSize, layout: TrainerLayout) -> list[Parts]:
    """Return the parts at each moment of a step with FSDP2.

    Weights, which are the masters too, moments and gradients are sharded, in float32. Embedding, last norm and LM head
    are gathered from the forward to the end of the backward, decoder layers one at a time and the next one ahead; each
    gather has a buffer as large as what it gathers. A gradient is whole until it is copied, in float32, for the
    reduce-scatter, of whose input gloo makes a copy.
    """
    e, adapters, layers = item_bytes(layout.precision), layout.adapters, shape.num_layers
    trained = shape.num_weights if adapters is None else adapters.trained_weights(shape, layers)
    shard = -(-trained * FLOAT32 // layout.dp)
    held = {
        "parameters": shard,
        "optimizer": layout.adam_moments * shard,
    }
    if adapters is not None:
        held["base"] = -(-adapters.base_bytes(shape.num_weights, layers, e) // layout.dp)
    before = shard if layout.has_several_micro_batches else 0
    gathered_root, gathered_layer = _gathered_bytes(shape, layout)
    of_layer, of_root = gathered_layer // e, gathered_root // e
    head_gradient = FLOAT32 * shape.vocabulary * shape.hidden if adapters is None else 0
    kept = _kept_bytes(shape, size, layout, layers)
    gloo_copy = FLOAT32 if layout.device == "cpu" else 0
    per_weight = max(e + FLOAT32, FLOAT32 + gloo_copy + -(-FLOAT32 // layout.dp))  # copied, then reduced to a shard
    if adapters is not None:
        of_layer, of_root = adapters.layer_weights, adapters.trained_weights(shape, 0)
    reduced = per_weight * max(of_layer, of_root)
    moments: list[Parts] = [
        {
            **held,
            "gradients": before,
            "activations": kept,
            "LM head": head_gradient
            + head_bytes(shape, size, layout.precision, layout.device, is_trained=adapters is None),
            "gathered": gathered_root,
        },
        {
            **held,
            "gradients": before,
            "activations": kept,
            "backward": head_gradient + backward_bytes(shape, size, layout.precision) + layout.gathered_keys,
            "gathered": gathered_root + 3 * gathered_layer,
        },
        {
            **held,
            "gradients": shard,
            "backward": head_gradient,
            "gathered": gathered_root,
            "communication": reduced,
        },
    ]
    if layout.fsdp_copies > 1:
        largest = -(-(shape.largest_tensor if adapters is None else adapters.largest_tensor) * FLOAT32 // layout.dp)
        moments.append({**held, "gradients": shard, "communication": min(shard, max(BUCKET_BYTES, largest))})
    return moments
