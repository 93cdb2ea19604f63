"""Forecast the memory of activations: what autograd keeps of a micro-batch, and what its passes need besides.

Of the architectures with packed attention. Every count follows from an operation of transformers' layers, and a test
compares them with the tensors that real layers keep. Bytes throughout; e bytes of an element of the model's precision,
H hidden size, A query heads times head size, K key heads times head size, F intermediate size, V vocabulary (A, K, F, V
of this tensor-parallel rank), T tokens of a row, N tokens that the loss counts, C tokens of a chunk; of a mixture E
experts of intermediate size I, of which a token passes D.
"""

from dataclasses import dataclass

from coati_rl.config.model import FLOAT32_ATTENTION
from coati_rl.memory.adapters import AdapterShape
from coati_rl.memory.model_shape import ModelShape
from coati_rl.ops.cpu_products import PRODUCT_BLOCK
from coati_rl.ops.vocab_chunks import CHUNK_ELEMENTS, ROW_MULTIPLE
from coati_rl.types import Device

FLOAT32 = 4  # bytes
HEAP_BYTES = 2**25  # of an allocation: larger ones glibc maps by themselves, and returns when they are freed


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchSize:
    """Hold the largest micro-batch of a step."""

    tokens: int  # T, shared ones once
    loss_tokens: int  # N
    path_tokens: int = 0  # over all segments behind a prefix: their tokens and those before them
    masked: int = 0  # pairs of a segment behind a prefix and the tokens that it may attend to, where it takes a mask
    longest: int  # tokens of the longest sample, those of its prefix included


def item_bytes(precision: str) -> int:
    """Return e, the bytes of an element in the model's precision, fp32 or bf16."""
    return FLOAT32 if precision == "fp32" else 2


def layer_bytes(
    shape: ModelShape, size: MicroBatchSize, precision: str, device: Device, adapters: AdapterShape | None = None
) -> int:
    """Return what autograd keeps of one decoder layer.

    Of each token:

    - both norms: the input in float32, and in the model's precision the normalized input, which the weight's gradient
      needs, and the output, which the next matrix products need: 2 H (4 + e + e), and 2 roots in float32
    - norms of queries and keys (Qwen3): input and normalized input, (A + K) (4 + e), and a root for each head
    - attention: queries, keys and values after the rotation, a (A + 2 K); its output by sample, a A, and joined to a
      row, e A; the log-sum-exp of each head in float32
    - the MLP: gate, activated gate, up and their product, e 4 F; of a mixture see `_routed_bytes`

    and of each token on a path behind a prefix a 2 K, as keys and values are copied for each sample. a is e, or 4 where
    short samples are attended to in float32.

    With adapters no weight of a norm is trained, so that normalized inputs go, and inputs of matrix products stay only
    where a layer with an adapter reads them. Each adapter has its rank's vector besides, e rank.
    """
    e, a = item_bytes(precision), _attention_item_bytes(size, precision, device)
    num_keys = shape.num_heads * shape.keys // shape.queries
    # How many of these are kept: inputs of attention and MLP, their last products, normalized inputs of norms.
    inputs, of_attention, of_mlp, normalized, vectors = 2, 1, 1, 1, 0
    if adapters is not None:
        inputs = adapters.keeps_attention_input + adapters.keeps_mlp_input
        of_attention, of_mlp = int(adapters.keeps_attention_output), int(adapters.keeps_mlp_product)
        normalized, vectors = 0, e * adapters.rank * adapters.layer_adapters
    norms = 2 * (shape.hidden * (FLOAT32 + normalized * e) + FLOAT32) + inputs * e * shape.hidden
    if shape.normalizes_heads:
        norms += (shape.queries + shape.keys) * (FLOAT32 + normalized * e) + FLOAT32 * (shape.num_heads + num_keys)
    attention = a * 2 * (shape.queries + shape.keys) + of_attention * e * shape.queries + FLOAT32 * shape.num_heads
    mlp = e * (3 + of_mlp) * shape.intermediate + _routed_bytes(shape, e, is_trained=adapters is None)
    return size.tokens * (norms + attention + mlp + vectors) + size.path_tokens * a * 2 * shape.keys


def _routed_bytes(shape: ModelShape, e: int, *, is_trained: bool) -> int:
    """Return what autograd keeps of a token in a layer's experts and their router.

    Gate, activated gate, up and their product of each expert that the token passes, e 4 D I; its input and its output,
    e 2 D H, which the gradients of weight and router need; of experts that are not trained neither product nor input.
    In float32 the probabilities of E experts, and at most 2 D + 1 weights. Of a shared expert whose output has a
    weight both, e (H + 1).
    """
    if not shape.num_experts:
        return 0
    of_experts = (3 + is_trained) * shape.routed_intermediate + (1 + is_trained) * shape.routed_experts * shape.hidden
    router = FLOAT32 * (shape.num_experts + 2 * shape.routed_experts + 1)
    return e * (of_experts + shape.has_shared_gate * (shape.hidden + 1)) + router


def layer_input_bytes(shape: ModelShape, size: MicroBatchSize, precision: str) -> int:
    """Return what gradient checkpointing keeps of one decoder layer."""
    return size.tokens * item_bytes(precision) * shape.hidden


def _attention_item_bytes(size: MicroBatchSize, precision: str, device: Device) -> int:
    """Return a: as an element of the model, or 4 bytes where short samples are attended to in float32."""
    is_short = device == "cpu" and size.longest <= FLOAT32_ATTENTION
    return FLOAT32 if is_short else item_bytes(precision)


def kept_bytes(
    shape: ModelShape,
    size: MicroBatchSize,
    precision: str,
    device: Device,
    *,
    layers: int,
    is_recomputed: bool,
    is_offloaded: bool = False,
    adapters: AdapterShape | None = None,
) -> int:
    """Return what autograd keeps of a whole forward up to the last norm, and that norm's output, which the head reads.

    Behind shared prefixes attention has a mask where no kernel aligns causality to the last key, one for all layers.

    Args:
        shape: of this rank's part of the model.
        size: of the micro-batch.
        precision: fp32 or bf16.
        device: of the trainers.
        layers: on this pipeline stage.
        is_recomputed: with gradient checkpointing a layer keeps its input alone, e H, and the backward computes one
            layer at a time again.
        is_offloaded: these inputs are in host memory but for two, one that is used and one on its way.
        adapters: trained in place of the weights. The embedding, which is not trained, has no gradient then, and the
            first layer does not keep its norm's input.
    """
    e = item_bytes(precision)
    norm = size.tokens * (shape.hidden * FLOAT32 + FLOAT32)
    once = norm + size.tokens * 2 * e * shape.hidden
    if adapters is not None:
        once = (norm if is_recomputed else 0) + size.tokens * e * shape.hidden
    if device == "cpu" or precision == "fp32":
        once += size.masked * _attention_item_bytes(size, precision, device)
    one = layer_bytes(shape, size, precision, device, adapters)
    if is_recomputed:
        inputs = min(layers, 2) if is_offloaded else layers
        return inputs * layer_input_bytes(shape, size, precision) + once + (one if layers else 0)
    return layers * one + once


def heap_bytes(shape: ModelShape, size: MicroBatchSize, precision: str, *, kept: int, layers: int) -> int:
    """Return what the C library's heap holds besides tensors on the CPU, in a step of several micro-batches.

    Gradients are allocated while activations of a step's first micro-batch are freed, and come to lie between them.
    What is left between two gradients may be too small for what was there, so that the next micro-batch's activations
    lie elsewhere. That the heap has room for them twice is an assumption, no count: nothing is refused for it. Tensors
    of 32 MiB and more do not lie in the heap.

    Args:
        shape: of this rank's part of the model.
        size: of the micro-batch.
        precision: fp32 or bf16.
        kept: of `kept_bytes`.
        layers: whose activations are kept, one with gradient checkpointing.
    """
    routed, column = shape.routed_intermediate, size.tokens * item_bytes(precision)
    widths = [shape.intermediate] * 4 + [routed, routed, 2 * routed]
    return kept - layers * sum(column * width for width in widths if column * width >= HEAP_BYTES)


def adapter_heap_bytes(precision: str, *, kept: int, is_one: bool) -> int:
    """Return what the C library's heap holds besides tensors on the CPU in a step of adapters; see `heap_bytes`.

    A forward leaves gaps where outputs and normalized inputs were that nothing keeps. How many is a measurement, of
    `scripts/bench/memory_forecast.py --lora-rank 16`, and no count.

    Args:
        precision: fp32 or bf16.
        kept: of `kept_bytes`.
        is_one: whether a step has one micro-batch.
    """
    if is_one:
        return kept // 2
    return kept * 4 // 3 if precision == "fp32" else kept * 3 // 4


def backward_bytes(shape: ModelShape, size: MicroBatchSize, precision: str) -> int:
    """Return the gradients that live at a time in the backward of a layer, besides what is kept.

    Largest where the MLP's product is taken apart: gradients of the product and of both factors, of which the product
    itself is freed by then, and of the residual stream and what is added to it: e (2 F + 2 H) a token; of experts
    e (2 D I + D H).
    """
    of_experts = 2 * shape.routed_intermediate + shape.routed_experts * shape.hidden
    return size.tokens * item_bytes(precision) * (2 * shape.intermediate + 2 * shape.hidden + of_experts)


def chunk_rows(vocabulary: int, num_tokens: int, device: Device) -> int:
    """Return C, the tokens whose logits exist at a time; see `vocab_chunks.LMHead.new_buffer`."""
    rows = max(1, CHUNK_ELEMENTS[device] // vocabulary)
    if rows > ROW_MULTIPLE:
        rows -= rows % ROW_MULTIPLE
    return min(rows, num_tokens)


def head_bytes(
    shape: ModelShape, size: MicroBatchSize, precision: str, device: Device, *, is_trained: bool = True
) -> int:
    """Return what the LM head needs while the loss is computed, its weight's gradient apart.

    Logits of a chunk in float32, 4 C V, turned into their gradient in place, and hidden states of all loss tokens with
    their gradients, e 2 H N. In bfloat16 besides the logits before or their gradient after the conversion, 2 C V, and
    the product that is added to the weight's gradient, 2 V H; on the CPU it is made and added in blocks of rows, and to
    add one torch converts it to float32. On a GPU the softmax, before that, has the exponentials of a whole chunk
    beside its logits, 4 C V. `is_trained`: the head's weight has a gradient.
    """
    if shape.vocabulary == 1:  # a scalar head: hidden states and values in float32
        return size.loss_tokens * shape.hidden * (FLOAT32 + item_bytes(precision))
    logits = chunk_rows(shape.vocabulary, size.loss_tokens, device) * shape.vocabulary
    rows = size.loss_tokens * item_bytes(precision) * 2 * shape.hidden
    softmax = FLOAT32 * logits if device == "cuda" else 0
    if precision == "fp32":
        return FLOAT32 * logits + softmax + rows
    if not is_trained:
        product = 0
    elif device == "cpu":
        product = (2 + FLOAT32) * min(shape.vocabulary, PRODUCT_BLOCK) * shape.hidden
    else:
        product = 2 * shape.vocabulary * shape.hidden
    return FLOAT32 * logits + max(softmax, 2 * logits + product) + rows
