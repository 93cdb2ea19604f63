"""Compute attention of the last tokens of a path to all of it, and its gradients from the output and log-sum-exps.

With these two the backward needs no second forward. On a CPU the keys before the queries take one call of flash
attention without a mask, and the queries' own keys a causal one; their outputs are joined by their log-sum-exps, and
each call's gradients follow from the log-sum-exps of all. Behind a window, and where the device has no such kernel,
blocks of queries have a mask.

B rows, H heads of queries, N of keys, T queries, S >= T keys, of which the last T are their own, D size of a head.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from coati_rl.ops.vocab_chunks import slices
from consumer.models.attention_kernels import mask_maker

QUERY_BLOCK = 256  # queries under one mask: their mask and the pairs that it hides are bounded


class Settings(NamedTuple):
    """Hold what the calls of a layer have in common."""

    window: int | None  # tokens that a query sees, itself included; None: all before it
    scaling: float  # factor of the products of queries and keys
    deepest: int  # tokens of the longest path of the micro-batch, so that all its masks are parts of one


class ForBackward(NamedTuple):
    """Hold what attention's backward needs, in whatever form the function that takes it names."""

    gradient: Tensor  # of the output
    attended: Tensor  # the output
    log_sums: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


class _Tile(NamedTuple):
    """Name the keys of one call, and which of them its queries see: all, those up to their own, or those of a mask."""

    keys: slice
    is_causal: bool = False
    mask: Tensor | None = None  # [queries, keys], added to the scaled products


def attend_path(query: Tensor, key: Tensor, value: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Attend causally, the last query aligned to the last key.

    Args:
        query: [B, H, T, D].
        key: [B, N, S, D]; value likewise.
        value: see key.
        settings: of the layer.
    Returns: [B, H, T, D], and the log-sum-exp of each query's scaled products, float32[B, H, T].
    """
    attended, log_sums = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    for queries, tiles in _tiles(query, key, settings):
        parts = [
            _attend(query[:, :, queries], key[:, :, tile.keys], value[:, :, tile.keys], tile, settings.scaling)
            for tile in tiles
        ]
        attended[:, :, queries], log_sums[:, :, queries] = parts[0] if len(parts) == 1 else _joined(parts)
    return attended, log_sums


def add_path_gradients(of: ForBackward, settings: Settings, *, into: tuple[Tensor, Tensor, Tensor]) -> None:
    """Add the gradients of query, key and value to `into`, from arguments and results of `attend_path`."""
    of_query, of_key, of_value = into
    for queries, tiles in _tiles(of.query, of.key, settings):
        asking = [each[:, :, queries] for each in of[:4]]
        for tile in tiles:
            answering = [each[:, :, tile.keys] for each in of[4:]]
            found = _attend_backward(ForBackward(*asking, *answering), tile, settings.scaling)
            of_query[:, :, queries] += found[0]
            of_key[:, :, tile.keys] += found[1]
            of_value[:, :, tile.keys] += found[2]


def _tiles(query: Tensor, key: Tensor, settings: Settings) -> Iterator[tuple[slice, list[_Tile]]]:
    """Yield slices of queries, and the calls that compute them."""
    length, num_keys, window = query.shape[2], key.shape[2], settings.window
    past = num_keys - length
    if has_flash(query) and (window is None or num_keys <= window):
        own = _Tile(slice(past, num_keys), is_causal=True)
        yield slice(0, length), [_Tile(slice(0, past)), own] if past else [own]
        return
    deepest = settings.deepest if window is None else min(settings.deepest, window)
    mask = mask_maker(window)(QUERY_BLOCK, deepest, query.dtype, query.device)
    for block in slices(length, QUERY_BLOCK):
        count, start = block.stop - block.start, past + block.start
        before = start if window is None else min(start, window - 1)
        seen = slice(start - before, start + count)
        yield block, [_Tile(seen, mask=mask[:count, deepest - before : deepest + count])]


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the same queries over the keys of two calls."""
    (first, first_sums), (second, second_sums) = parts
    log_sums = torch.logaddexp(first_sums, second_sums)
    return first * _share(first_sums, log_sums) + second * _share(second_sums, log_sums), log_sums


def _share(log_sums: Tensor, of_all: Tensor) -> Tensor:
    return (log_sums - of_all).exp()[..., None]


def has_flash(query: Tensor) -> bool:
    """Say if flash attention takes these tensors with masks, and returns log-sum-exps: it does on CPUs alone."""
    return query.device.type == "cpu"


def _attend(query: Tensor, key: Tensor, value: Tensor, tile: _Tile, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exps of one call."""
    if not has_flash(query):
        scores = _scores(query, key, tile, scaling)
        log_sums = scores.logsumexp(dim=-1)
        attended = (scores - log_sums[..., None]).exp() @ value[:, :, None]
        return attended.flatten(1, 2), log_sums.flatten(1, 2)
    attended, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, tile.is_causal, attn_mask=tile.mask, scale=scaling
    )
    return attended, log_sums


def _attend_backward(of: ForBackward, tile: _Tile, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return what one call adds to the gradients of query, key and value."""
    gradient, attended, log_sums, query, key, value = of
    if not has_flash(query):
        grouped, by_head, outputs, sums = (
            each.unflatten(1, (key.shape[1], -1)) for each in (query, gradient, attended, log_sums)
        )
        weights = (_scores(query, key, tile, scaling) - sums[..., None]).exp()
        of_weights = by_head @ value[:, :, None].mT - (by_head * outputs).sum(dim=-1, keepdim=True)
        of_scores = scaling * weights * of_weights
        of_query = (of_scores @ key[:, :, None]).flatten(1, 2)
        return of_query, (of_scores.mT @ grouped).sum(dim=2), (weights.mT @ by_head).sum(dim=2)
    of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, attended, log_sums, 0.0, tile.is_causal, attn_mask=tile.mask, scale=scaling
    )
    return of_query, of_key, of_value


def _scores(query: Tensor, key: Tensor, tile: _Tile, scaling: float) -> Tensor:
    """Return scaled products, [B, N, H / N, queries, keys], with the mask added."""
    scores = scaling * (query.unflatten(1, (key.shape[1], -1)) @ key[:, :, None].mT)
    return scores if tile.mask is None else scores + tile.mask
