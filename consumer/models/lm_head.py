"""Give the weight of a model's logits: the LM head's own, or with its adapter."""

from typing import Any

from torch import Tensor


def head_weight(model: Any) -> Tensor:
    """Return the weight [V, H] that losses multiply hidden states with.

    They compute logits in chunks and not by the module, so that an adapter of the head is in the weight here, through
    which its factors get their gradients; see `Adapters.attach`.
    """
    head = model.get_output_embeddings()
    adapted = getattr(head, "adapted_weight", None)
    weight: Tensor = head.weight if adapted is None else adapted()
    return weight
