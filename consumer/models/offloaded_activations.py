"""Keep in host memory what recomputed layers begin with, from their forward to their backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from transformers.modeling_layers import GradientCheckpointingLayer


def offload_layer_inputs(model: nn.Module) -> None:
    """Have the inputs of decoder layers wait in pinned host memory; a trainer on a CPU keeps them where they are.

    Gradient checkpointing keeps a layer's inputs alone, by autograd's means: hooks around the checkpoint move them, and
    what is computed inside of it is not kept. Bits stay.

    Args:
        model: whose layers are checkpointed.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            layer._gradient_checkpointing_func = _offloaded(layer._gradient_checkpointing_func)


def _offloaded(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def run(forward: Callable[..., Any], *inputs: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(forward, *inputs)

    return run
