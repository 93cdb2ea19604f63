"""Forecast what context parallelism changes of a trainer rank's memory: its share of each row, and gathered keys.

L tokens of a whole row, D size of a head, C context-parallel ranks. Bytes throughout.
"""

from dataclasses import replace

from coati_rl.memory.activations import FLOAT32, MicroBatchSize
from coati_rl.memory.model_shape import ModelShape
from coati_rl.types import Device

# Of keys that are gathered at a time. On a GPU 16 MiB in bfloat16, and as many values: large enough for a link's speed.
GATHERED_ELEMENTS = {"cpu": 2**18, "cuda": 2**23}
# Of a chunk of heads in the backward: keys and values as they arrive or their gradients, and in the order of the row;
# a float32 copy of one gradient by rank, and gloo's own.
_COPIES = 6


def context_share(size: MicroBatchSize, num_ranks: int) -> MicroBatchSize:
    """Return a context-parallel rank's part of a micro-batch. Keys of paths are gathered, and none are kept.

    Its loss tokens are taken to be as many as its tokens allow, since a cut by work need not share them out evenly.
    """
    if num_ranks == 1:
        return size
    tokens = -(-size.tokens // num_ranks)
    return replace(size, tokens=tokens, loss_tokens=min(size.loss_tokens, tokens), path_tokens=0, masked=0)


def gathered_key_bytes(shape: ModelShape, size: MicroBatchSize, num_ranks: int, device: Device) -> int:
    """Return what a rank needs to attend to a whole micro-batch of this size, for some heads of one layer."""
    if num_ranks == 1:
        return 0
    head = shape.queries // shape.num_heads
    of_head = size.tokens * head
    heads = min(shape.keys // head, max(1, GATHERED_ELEMENTS[device] // of_head))
    return _COPIES * FLOAT32 * heads * of_head
