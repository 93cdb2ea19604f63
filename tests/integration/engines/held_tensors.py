"""Read the tensors that vLLM holds of a Qwen3-MoE on a CPU, by the names of its checkpoint, from what it computes with.

vLLM joins tensors and packs them for its products. The packed weight of a linear layer is what the layer makes of the
identity, exactly in float32. Packed experts are permuted: where each number went is seen from packed indices.
E experts, F intermediate size, H hidden size.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


def held_tensors(model: Any) -> dict[str, np.ndarray]:
    """float32 by name. `model`: of a vLLM worker, whole on one rank."""
    found = {"model.norm.weight": model.model.norm.weight}
    found["model.embed_tokens.weight"] = model.model.embed_tokens.weight[: model.config.vocab_size]
    found["lm_head.weight"] = _linear(model.lm_head)[: model.config.vocab_size]
    for number, layer in enumerate(model.model.layers):
        found |= {f"model.layers.{number}.{name}": tensor for name, tensor in _of_layer(layer)}
    return {name: tensor.detach().contiguous().numpy() for name, tensor in found.items()}


def _of_layer(layer: Any) -> Iterator[tuple[str, Tensor]]:
    attention, mlp = layer.self_attn, layer.mlp
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", getattr(layer, name).weight
    for name in ("q_norm", "k_norm"):
        yield f"self_attn.{name}.weight", getattr(attention, name).weight
    sizes = [attention.q_size, attention.kv_size, attention.kv_size]
    for name, tensor in zip("qkv", _linear(attention.qkv_proj).split(sizes), strict=True):
        yield f"self_attn.{name}_proj.weight", tensor
    yield "self_attn.o_proj.weight", _linear(attention.o_proj)
    if not hasattr(mlp, "experts"):  # a dense layer
        yield from _of_expert("mlp", _linear(mlp.gate_up_proj), _linear(mlp.down_proj))
        return
    yield "mlp.gate.weight", _linear(mlp.gate)
    (experts,) = (each for each in mlp.modules() if hasattr(each, "w13_weight"))
    kernel, size = experts.quant_method.moe_kernel.fused_experts, experts.moe_config.intermediate_size_per_partition
    joined, down = (_unpacked(each.data, kernel.isa) for each in (experts.w13_weight, experts.w2_weight))
    joined = joined.unflatten(1, (2, -1))[:, :, :size].flatten(1, 2)  # without the padding of each half
    for number, tensors in enumerate(zip(joined, down[:, :, :size], strict=True)):
        yield from _of_expert(f"mlp.experts.{number}", *tensors)


def _of_expert(name: str, joined: Tensor, down: Tensor) -> Iterator[tuple[str, Tensor]]:
    gate, up = joined.chunk(2)
    yield from ((f"{name}.{part}_proj.weight", each) for part, each in (("gate", gate), ("up", up), ("down", down)))


def _linear(layer: Any) -> Tensor:
    """[out, in] of a linear layer without a bias."""
    size = getattr(layer, "input_size", None) or layer.embedding_dim
    return layer.quant_method.apply(layer, torch.eye(size)).T


def _unpacked(packed: Tensor, isa: str) -> Tensor:
    """[E, out, in] of packed experts; indices are exact in float32."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    assert packed.numel() < 2**24
    indices = torch.arange(packed.numel(), dtype=torch.float32).view(packed.shape)
    places = cpu_prepack_moe_weight(indices, isa).flatten().long()
    plain = torch.empty_like(packed).flatten()
    plain[places] = packed.flatten()
    return plain.view(packed.shape)
