"""The policy's weights as engines load them: full Hugging Face tensors, in Hugging Face order, one after another.

A generator, so that a layout that shards its weights can gather a tensor at a time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


def export_weights(model: nn.Module, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight once, in the order of `state_dict`.

    Args:
        model: the unwrapped model; it holds its weights whole.
        dtype: the wire's, which is the engines'; float32 or bfloat16.
    Yields: (name, tensor of the model's shape). A tied LM head shares the embedding's storage and is left out, as in a
        saved checkpoint. A tensor that needs no cast is the live weight itself: send it before the next step.
    """
    seen: set[int] = set()
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) not in seen:
            seen.add(id(weight))
            yield name, weight.detach().to(dtype)
