"""Compute torch's attention kernels for CUDA from their definitions, and refuse what those refuse.

Flash attention's kernel on packed sequences (varlen) aligns a causal mask to the last key, SDPA's to the first. H
heads, L queries, S keys, D size of a head, T tokens of all sequences.
"""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
LIBRARY = torch.library.Library("aten", "IMPL")


def visible_keys(
    num_queries: int, num_keys: int, *, is_causal: bool, left: int | None = -1, right: int | None = -1, device: Any
) -> Tensor:
    """Return bool[L, S]: keys that each query sees, the last query being at the last key. -1 and None: no bound."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None]
    right = 0 if is_causal else right
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    if right is not None and right >= 0:
        seen &= key <= query + right
    if left is not None and left >= 0:
        seen &= key >= query - left
    return seen


def with_heads(keys: Tensor, num_heads: int) -> Tensor:
    """Repeat the shared heads of keys or values: [..., G, S, D] to [..., H, S, D]."""
    return keys.float().repeat_interleave(num_heads // keys.shape[-3], -3)


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return float32[..., H, L, D] and the logarithm of each query's sum, float32[..., H, L].

    Args:
        query: [..., H, L, D]; key and value: [..., G, S, D].
        bias: float32[..., L, S], added to the scores; -inf where a key is not seen.
    """
    scores = query.float() @ with_heads(key, query.shape[-3]).transpose(-1, -2) * scale + bias
    log_sum = scores.logsumexp(-1)
    weights = torch.where(log_sum.isinf()[..., None], 0.0, (scores - log_sum[..., None]).exp())
    return weights @ with_heads(value, query.shape[-3]), log_sum


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and bias, in float32."""
    num_heads, num_shared = query.shape[-3], key.shape[-3]
    keys, values, grad = with_heads(key, num_heads), with_heads(value, num_heads), grad.float()
    weights = (query.float() @ keys.transpose(-1, -2) * scale + bias - log_sum.float()[..., None]).exp()
    of_weights = grad @ values.transpose(-1, -2) - (grad * out.float()).sum(-1, keepdim=True)
    of_scores = weights * of_weights
    of_key, of_value = of_scores.transpose(-1, -2) @ query.float() * scale, weights.transpose(-1, -2) @ grad
    of_key, of_value = (t.unflatten(-3, (num_shared, -1)).sum(-3) for t in (of_key, of_value))
    return of_scores @ keys * scale, of_key, of_value, of_scores


def as_bias(seen: Tensor) -> Tensor:
    """Convert bool[L, S] to float32[L, S]: 0 where a key is seen, else -inf."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, float("-inf"))


def check_varlen(query: Tensor, key: Tensor, value: Tensor, boundaries: tuple[Tensor, Tensor], sizes: Any) -> None:
    """Refuse what flash attention refuses, and what would make it read or leave out other tokens.

    Raises: RuntimeError.
    """
    if query.dtype not in HALF or {key.dtype, value.dtype} != {query.dtype}:
        raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, not {query.dtype}")
    if any(t.stride(-1) != 1 for t in (query, key, value)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        raise RuntimeError(f"head_size {query.shape[-1]} should be a multiple of 8, and at most 256")
    if query.shape[-2] % key.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    for bounds, tokens, longest in zip(boundaries, (query, key), sizes, strict=True):
        if bounds.dtype != torch.int32 or not bounds.is_contiguous() or not bounds.is_cuda:
            raise RuntimeError(f"cu_seqlens must be contiguous, of int32 and on the GPU, not {bounds.dtype}")
        if int(bounds[0]) or int(bounds[-1]) != tokens.shape[0]:
            raise RuntimeError("cu_seqlens do not go from 0 to the number of tokens")
        if int(bounds.diff().max()) > longest:
            raise RuntimeError(f"max_seqlen {longest} is below the longest sequence: the kernel would leave out tokens")


def varlen(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    """See aten::_flash_attention_forward with boundaries of sequences."""
    query_bounds, key_bounds, longest_query, longest_key, _, is_causal, _ = arguments
    check_varlen(query, key, value, (query_bounds, key_bounds), (longest_query, longest_key))
    out, log_sum = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    for rows, columns, bias, scale in _sequences(query, query_bounds, key_bounds, is_causal, options):
        parts = (t.transpose(0, 1) for t in (query[rows], key[columns], value[columns]))
        attended, log_sum[:, rows] = attend(*parts, bias, scale)
        out[rows] = attended.transpose(0, 1).to(query.dtype)
    seeds = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return out, log_sum, seeds, seeds.clone(), query.new_empty(0)


def varlen_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *arguments: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    """See aten::_flash_attention_backward. Tokens of the keys may be in no sequence, and have no gradient then."""
    query_bounds, key_bounds, longest_query, longest_key, _, is_causal, *_ = arguments
    check_varlen(query, key, value, (query_bounds, key_bounds), (longest_query, longest_key))
    gradients = tuple(torch.zeros_like(t) for t in (query, key, value))
    for rows, columns, bias, scale in _sequences(query, query_bounds, key_bounds, is_causal, options):
        given = (grad[rows], query[rows], key[columns], value[columns], out[rows])
        found = attend_backward(*(t.transpose(0, 1) for t in given), log_sum[:, rows], bias, scale)
        for target, place, gradient in zip(gradients, (rows, columns, columns), found, strict=False):
            target[place] = gradient.transpose(0, 1).to(target.dtype)
    return gradients


def _sequences(query: Tensor, query_bounds: Tensor, key_bounds: Tensor, is_causal: bool, options: Any) -> Any:
    """Yield the slices of queries and of keys, the bias and the scale of each sequence."""
    scale = options.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    window = {"left": options.get("window_size_left"), "right": options.get("window_size_right")}
    pairs = zip(pairwise(query_bounds.tolist()), pairwise(key_bounds.tolist()), strict=True)
    for rows, columns in pairs:
        num_queries, num_keys = rows[1] - rows[0], columns[1] - columns[0]
        seen = visible_keys(num_queries, num_keys, is_causal=is_causal, device=query.device, **window)
        yield slice(*rows), slice(*columns), as_bias(seen), scale


def _sdpa_bias(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor:
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    whole = as_bias(seen.tril() if is_causal else seen)
    return whole if bias is None else whole + bias.float()


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def flash(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, scale: Any = None) -> tuple[Any, ...]:
    """See aten::_scaled_dot_product_flash_attention."""
    is_causal = arguments[1] if len(arguments) > 1 else False
    out, log_sum = attend(query, key, value, _sdpa_bias(query, key, None, is_causal), _scale(query, scale))
    seeds = torch.zeros(2, dtype=torch.uint64, device=query.device)
    sizes = query.shape[2], key.shape[2]
    return out.to(query.dtype), log_sum, None, None, *sizes, seeds, seeds.clone(), query.new_empty(0)


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *arguments: Any,
    scale: Any = None,
) -> tuple[Tensor, ...]:
    """See aten::_scaled_dot_product_flash_attention_backward."""
    bias = _sdpa_bias(query, key, None, arguments[5])
    found = attend_backward(grad, query, key, value, out, log_sum, bias, _scale(query, scale))
    return tuple(t.to(query.dtype) for t in found[:3])


def efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *arguments: Any, scale: Any = None
) -> tuple[Tensor, ...]:
    """See aten::_scaled_dot_product_efficient_attention."""
    is_causal = arguments[2] if len(arguments) > 2 else False
    out, log_sum = attend(query, key, value, _sdpa_bias(query, key, bias, is_causal), _scale(query, scale))
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    return out.to(query.dtype), log_sum, seed, seed.clone()


def efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *arguments: Any, scale: Any = None
) -> tuple[Tensor | None, ...]:
    """See aten::_scaled_dot_product_efficient_attention_backward."""
    out, log_sum, _, _, _, wanted = arguments[:6]
    is_causal = arguments[6] if len(arguments) > 6 else False
    whole = _sdpa_bias(query, key, bias, is_causal)
    found = attend_backward(grad, query, key, value, out, log_sum[..., : query.shape[-2]], whole, _scale(query, scale))
    *gradients, of_bias = (t.to(query.dtype) for t in found)
    return *gradients, of_bias if wanted[3] else None


def _unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function read boundaries where host syncs are counted or refused: a kernel reads them on the GPU."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        mode = torch.cuda.get_sync_debug_mode()
        torch._C._cuda_set_sync_debug_mode(0)
        try:
            return function(*arguments, **options)
        finally:
            torch._C._cuda_set_sync_debug_mode(mode)

    return call


def replace_kernels() -> None:
    """Register these functions as torch's kernels for CUDA."""
    for name, function in {
        "_flash_attention_forward": varlen,
        "_flash_attention_backward": varlen_backward,
        "_scaled_dot_product_flash_attention": flash,
        "_scaled_dot_product_flash_attention_backward": flash_backward,
        "_scaled_dot_product_efficient_attention": efficient,
        "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    }.items():
        LIBRARY.impl(name, _unwatched(function), "CUDA")
    torch.backends.cuda.enable_cudnn_sdp(False)
