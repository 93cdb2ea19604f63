"""Compute vLLM's kernels (norms, rotation, activation, embedding, cache, paged attention) from their definitions.

T tokens, H heads, D size of a head. Of the cache's blocks, a sequence's table lists those that hold its keys.
"""

from itertools import pairwise
from typing import Any

import torch
from emulation.attention import as_bias, attend, visible_keys
from torch import Tensor
from torch.nn import functional

LIBRARIES: list[torch.library.Library] = []  # a library takes its kernels away when it is freed


def _normed(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return normed.to(x.dtype) if weight is None else normed.to(x.dtype) * weight


def rms_norm(result: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Write the normed input to `result`."""
    result.copy_(_normed(x, weight, epsilon))


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Add the input to `residual`, and write the normed sum to the input."""
    residual.add_(x)
    x.copy_(_normed(residual, weight, epsilon))


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate query and key in place: halves of a head, or neighbours."""
    size = cos_sin_cache.shape[-1]
    cos, sin = (t[:, None] for t in cos_sin_cache[positions.flatten()].float().chunk(2, -1))
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(positions.numel(), -1, head_size)
        rotated = heads[..., rope_dim_offset : rope_dim_offset + size]
        left, right = rotated.float().chunk(2, -1) if is_neox else rotated.float().unflatten(-1, (-1, 2)).unbind(-1)
        pair = left * cos - right * sin, right * cos + left * sin
        rotated.copy_(torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2))


def silu_and_mul(result: Tensor, x: Tensor) -> None:
    """Write silu(first half) * second half."""
    gate, up = x.chunk(2, -1)
    result.copy_(functional.silu(gate.float()).to(x.dtype) * up)


def vocab_parallel_embedding(
    out: Tensor, ids: Tensor, weight: Tensor, start: int, end: int, padding: int, added_start: int, added_end: int
) -> None:
    """Write the rows of this rank's tokens; rows of others are 0."""
    is_own, is_added = (ids >= start) & (ids < end), (ids >= added_start) & (ids < added_end)
    row = torch.where(is_own, ids - start, torch.where(is_added, ids - added_start + end - start + padding, 0))
    out.copy_(weight[row.long()] * (is_own | is_added)[:, None])


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *_: Any
) -> None:
    """Write keys and values to their slots of the cache; a slot of -1 is padding."""
    kept = [(index, slot) for index, slot in enumerate(slots.tolist()) if slot >= 0]
    for index, slot in kept:
        block, place = divmod(slot, key_cache.shape[1])
        key_cache[block, place] = key[index].to(key_cache.dtype)
        value_cache[block, place] = value[index].to(value_cache.dtype)


def _attend_paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    bounds: Tensor,
    key_bounds: Tensor | None,
    num_used: Tensor | None,
    table: Tensor | None,
    scale: float,
    mask: dict[str, Any],
) -> Tensor:
    """Write the attention of all sequences to `out`. Returns: float32[H, T], logarithms of the queries' sums."""
    log_sum = torch.zeros(query.shape[1], query.shape[0], device=query.device)
    for index, (start, end) in enumerate(pairwise(bounds.tolist())):
        if start == end:
            continue
        if table is None:
            assert key_bounds is not None
            columns = slice(*key_bounds[index : index + 2].tolist())
            own = keys[columns], values[columns]
        else:
            assert num_used is not None
            length = int(num_used[index])
            blocks = table[index, : -(-length // keys.shape[1])].long()
            own = tuple(t[blocks].flatten(0, 1)[:length] for t in (keys, values))
        parts = (t.transpose(0, 1) for t in (query[start:end], *own))
        seen = visible_keys(end - start, len(own[0]), device=query.device, **mask)
        attended, log_sum[:, start:end] = attend(*parts, as_bias(seen), scale)
        out[start:end] = attended.transpose(0, 1).to(out.dtype)
    return log_sum


def flash_attention_3(
    q: Tensor, k: Tensor, v: Tensor, k_new: Any, v_new: Any, q_v: Any, out: Tensor | None, *arguments: Any
) -> list[Tensor]:
    """See vLLM's `_vllm_fa3_C.fwd`."""
    bounds, key_bounds, _, _, num_used, _, _, table = arguments[:8]
    scale, is_causal, left, right = arguments[16:20]
    out = torch.empty_like(q) if out is None else out
    mask = {"is_causal": is_causal, "left": left, "right": right}
    log_sum = _attend_paged(
        q, k, v, out, bounds=bounds, key_bounds=key_bounds, num_used=num_used, table=table, scale=scale, mask=mask
    )
    return [out, log_sum, torch.empty(0, device=q.device), torch.empty(0, device=q.device)]


def flash_attention_2(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, *arguments: Any) -> list[Tensor]:
    """See vLLM's `_vllm_fa2_C.varlen_fwd`."""
    bounds, key_bounds, num_used, _, table, _, _, _, _, scale, _, is_causal, left, right = arguments[:14]
    out = torch.empty_like(q) if out is None else out
    mask = {"is_causal": is_causal, "left": left, "right": right}
    log_sum = _attend_paged(
        q, k, v, out, bounds=bounds, key_bounds=key_bounds, num_used=num_used, table=table, scale=scale, mask=mask
    )
    return [out, log_sum]


def scheduler_metadata(batch_size: int, *_: Any) -> Tensor:
    """Return what `flash_attention_3` does not read."""
    return torch.zeros(batch_size + 1, dtype=torch.int32, device="cuda")


KERNELS = {
    "_C": {
        "vocab_parallel_embedding": vocab_parallel_embedding,
        "rms_norm": rms_norm,
        "fused_add_rms_norm": fused_add_rms_norm,
        "rotary_embedding": rotary_embedding,
        "silu_and_mul": silu_and_mul,
    },
    "_C_cache_ops": {"reshape_and_cache_flash": reshape_and_cache_flash},
    "_vllm_fa3_C": {"fwd": flash_attention_3, "get_scheduler_metadata": scheduler_metadata},
    "_vllm_fa2_C": {"varlen_fwd": flash_attention_2},
}


def unified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
    softcap: float,
    *_: Any,
    **others: Any,
) -> None:
    """See vLLM's function of this name, the attention of float32: Triton's interpreter takes 90 % of a run for it."""
    assert softcap == 0 and others.get("alibi_slopes") is None and others.get("sinks") is None
    mask = {"is_causal": causal, "left": window_size[0], "right": window_size[1]}
    sequences = {"bounds": cu_seqlens_q, "key_bounds": None, "num_used": seqused_k, "table": block_table}
    _attend_paged(q, k, v, out, **sequences, scale=softmax_scale, mask=mask)


def replace_triton_attention() -> None:
    """Compute attention in float32, a kernel of Triton's, from its definition."""
    from vllm.v1.attention.ops import triton_unified_attention

    triton_unified_attention.unified_attention = unified_attention


def replace_kernels() -> None:
    """Register these functions as vLLM's kernels for CUDA, where this release has them."""
    for namespace, functions in KERNELS.items():
        library = torch.library.Library(namespace, "IMPL")
        LIBRARIES.append(library)
        for name, function in functions.items():
            if hasattr(getattr(torch.ops, namespace), name):
                library.impl(name, function, "CUDA")
