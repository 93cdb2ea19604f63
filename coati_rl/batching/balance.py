"""Assign samples to the micro-batches of data-parallel ranks by their lengths.

Every rank gets equally many micro-batches, as few as the heuristics find within the limits, and the k-th ones of all
ranks have about the same cost: a pipeline, or a reduction, waits for the slowest. The result depends on the lengths and
their order alone.
A bin holds the indices of the samples of one micro-batch; its cost is the number of tokens that a forward computes.
What is assigned may be several samples at once, which share a prefix, see `prefix_groups`.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

Bins = list[list[int]]


def assign_to_bins(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_samples: int,
    max_tokens: int | None = None,
    one_sample_per_row: bool = False,
    sizes: Sequence[int] | None = None,
) -> list[Bins]:
    """Assign every sample to exactly one bin.

    Args:
        lengths: tokens of each sample.
        num_ranks: data-parallel ranks.
        max_samples: per bin; one that counts for more is alone in its bin.
        max_tokens: per bin, at least the longest sample; None for no limit.
        one_sample_per_row: rows are padded to the bin's longest sample, and padding counts as tokens.
        sizes: for how many samples each counts; None: one. Not for padded rows.
    Returns: [rank][k], the indices of the samples in the rank's k-th micro-batch; empty where there are not enough.
    """
    if not lengths:
        return [[] for _ in range(num_ranks)]
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))  # longest first
    limit = sum(lengths) if max_tokens is None else max_tokens
    if one_sample_per_row:
        limit = len(lengths) * max(lengths) if max_tokens is None else max_tokens
        fewest = len(_cut_rows(lengths, order, max_samples, limit))
        bins = _cut_evenly(lengths, order, max_samples, limit, _round_up(fewest, num_ranks))
        return _distribute(bins, num_ranks, lambda bin_: len(bin_) * max(lengths[i] for i in bin_))
    if max_tokens is None and sizes is None:
        first_fit = [order[start : start + max_samples] for start in range(0, len(order), max_samples)]
    else:
        first_fit = _first_fit(lengths, order, max_samples, limit, sizes)
    num_bins = _round_up(len(first_fit), num_ranks)
    bins = _lightest_first(lengths, order, max_samples, limit, sizes, num_bins) or first_fit
    return _distribute(bins, num_ranks, lambda bin_: sum(lengths[i] for i in bin_))


def lockstep_cost(ranks: Sequence[Bins], lengths: Sequence[int], *, num_stages: int = 1) -> int:
    """Return the tokens of the largest k-th bin of all ranks, summed over k: each rank waits for it.

    In a pipeline the last stage starts, and the first one ends, `num_stages` - 1 bins apart: so many times the largest
    bin is added.
    """
    largest: list[int] = [
        max(sum(lengths[i] for i in bin_) for bin_ in together) for together in zip(*ranks, strict=True)
    ]
    return sum(largest) + (num_stages - 1) * max(largest, default=0)


def _round_up(num_bins: int, num_ranks: int) -> int:
    """Round up to a multiple of the ranks."""
    return -(-num_bins // num_ranks) * num_ranks


def _first_fit(
    lengths: Sequence[int], order: Sequence[int], max_samples: int, limit: int, sizes: Sequence[int] | None
) -> Bins:
    """Pack by first-fit-decreasing: few bins, the last of them nearly empty."""
    bins: Bins = []
    free_tokens, free_samples = (np.zeros(len(lengths), dtype=np.int64) for _ in range(2))  # of each bin
    for index in order:
        size = 1 if sizes is None else sizes[index]
        fits = (free_tokens[: len(bins)] >= lengths[index]) & (free_samples[: len(bins)] >= size)
        if fits.any():
            place = int(fits.argmax())
        else:
            place = len(bins)
            bins.append([])
            free_tokens[place], free_samples[place] = limit, max_samples
        bins[place].append(index)
        free_tokens[place] -= lengths[index]
        free_samples[place] -= size
    return bins


def _lightest_first(
    lengths: Sequence[int],
    order: Sequence[int],
    max_samples: int,
    limit: int,
    sizes: Sequence[int] | None,
    num_bins: int,
) -> Bins | None:
    """Assign the longest sample to the lightest of so many bins: even bins, or None if a limit is too tight."""
    bins: Bins = [[] for _ in range(num_bins)]
    held = [0] * num_bins  # samples
    open_bins = [(0, place) for place in range(num_bins)]  # a heap of (tokens, bin), without bins that have max_samples
    for index in order:
        size = 1 if sizes is None else sizes[index]
        passed = []  # lighter ones without room for so many samples
        while open_bins and held[open_bins[0][1]] and held[open_bins[0][1]] + size > max_samples:
            passed.append(heappop(open_bins))
        if not open_bins or open_bins[0][0] + lengths[index] > limit:
            return None
        tokens, place = heappop(open_bins)
        bins[place].append(index)
        held[place] += size
        if held[place] < max_samples:
            heappush(open_bins, (tokens + lengths[index], place))
        for each in passed:
            heappush(open_bins, each)
    return bins


def _cut_rows(lengths: Sequence[int], order: Sequence[int], max_samples: int, limit: int) -> Bins:
    """Cut into runs of samples of similar length, each as long as the limits allow, which gives the fewest bins."""
    bins: Bins = []
    start = 0
    while start < len(order):
        num_rows = min(max_samples, limit // lengths[order[start]])
        bins.append(list(order[start : start + num_rows]))
        start += num_rows
    return bins


def _cut_evenly(lengths: Sequence[int], order: Sequence[int], max_samples: int, limit: int, num_bins: int) -> Bins:
    """Apply `_cut_rows` with the smallest limit that gives at most `num_bins`."""
    low, high = lengths[order[0]], limit
    while low < high:
        middle = (low + high) // 2
        if len(_cut_rows(lengths, order, max_samples, middle)) <= num_bins:
            high = middle
        else:
            low = middle + 1
    return _cut_rows(lengths, order, max_samples, high)


def _distribute(bins: Bins, num_ranks: int, cost: Callable[[list[int]], int]) -> list[Bins]:
    """Distribute bins of similar cost to all ranks in rounds, heaviest first; the lightest rank gets the heaviest."""
    costs = {place: cost(bin_) if bin_ else 0 for place, bin_ in enumerate(bins)}
    order = sorted(costs, key=lambda place: (-costs[place], place))
    ranks: list[Bins] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        lightest = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for turn, rank in enumerate(lightest):
            place = order[start + turn] if start + turn < len(order) else None
            ranks[rank].append([] if place is None else sorted(bins[place]))
            totals[rank] += 0 if place is None else costs[place]
    return ranks
