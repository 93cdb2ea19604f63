"""Choose the parameters that weight decay leaves alone: norms, biases, and those that no text gives a gradient."""

import re

from torch import nn
from transformers import PreTrainedModel

# Of the name in lower case: `transformers.Trainer.get_decay_parameter_names` has these patterns.
_EXEMPT = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")


def names_without_decay(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's norms and biases, and of all parameters beside its language model.

    Those, of images and sounds, have no gradient here: torch's optimizers leave them as they are; ours get zeros.

    Args:
        model: the full model, before it is sharded: afterwards a part of a matrix may have one dimension.
    Returns: names of `named_parameters`.
    Source: `Trainer.get_decay_parameter_names` of transformers, whose names are all others; the same for Llama-like
        models as OpenRLHF's and as leaving out all vectors.
    """
    beside = set[nn.Parameter]()
    if isinstance(model, PreTrainedModel):
        beside = {*model.base_model.parameters()} - {*model.get_decoder().parameters()}
    return frozenset(
        name
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(prefix, recurse=False)
        if isinstance(module, nn.LayerNorm) or _EXEMPT.search(name.lower()) or parameter in beside
    )
