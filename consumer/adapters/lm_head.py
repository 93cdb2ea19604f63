"""Let an adapter change the LM head of a model whose head is the embedding: the head gets a weight of its own."""

from typing import Any

from torch import nn


def lm_head_name(model: Any) -> str:
    """Return the name of a language model's head."""
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)


def untie_lm_head(model: Any, targets: tuple[str, ...]) -> dict[str, str]:
    """Give the head a copy of the embedding's weight, if a target names the head and the two are one parameter.

    Returns: the name of the embedding's weight by the head's; empty if they stay as they were.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return {}
    name = lm_head_name(model)
    if not any(f".{name}".endswith(f".{target}") for target in targets):
        return {}
    tied = next(each for each, parameter in model.named_parameters() if parameter is head.weight)
    head.weight = nn.Parameter(head.weight.detach().clone())
    return {f"{name}.weight": tied}
