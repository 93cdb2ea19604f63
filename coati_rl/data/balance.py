"""Sample lengths -> which sample goes into which micro-batch of which dp rank.

Every rank gets equally many micro-batches, as few as can be found within the limits, and at the k-th of them all ranks
have about the same work: a pipeline, or a reduction, waits for the slowest. The outcome depends on the lengths and
their order alone.
A bin is what becomes a micro-batch: the indices of its samples; its cost is what a forward computes, in tokens.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

Bins = list[list[int]]


def share_out(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    max_samples: int,
    max_tokens: int | None = None,
    one_sample_per_row: bool = False,
) -> list[Bins]:
    """Every sample into exactly one bin.

    Args:
        lengths: tokens of each sample.
        num_ranks: data-parallel ranks.
        max_samples: per bin.
        max_tokens: per bin, at least the longest sample; None for no limit.
        one_sample_per_row: rows are padded to the bin's longest sample, and padding counts as tokens.
    Returns: [rank][k], the indices of the samples in the rank's k-th micro-batch; empty where there are not enough.
    """
    if not lengths:
        return [[] for _ in range(num_ranks)]
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))  # longest first
    limit = sum(lengths) if max_tokens is None else max_tokens
    if one_sample_per_row:
        limit = len(lengths) * max(lengths) if max_tokens is None else max_tokens
        fewest = len(_cut_rows(lengths, order, max_samples, limit))
        bins = _cut_evenly(lengths, order, max_samples, limit, _whole(fewest, num_ranks))
        return _deal(bins, num_ranks, lambda bin_: len(bin_) * max(lengths[i] for i in bin_))
    if max_tokens is None:
        first_fit = [order[start : start + max_samples] for start in range(0, len(order), max_samples)]
    else:
        first_fit = _first_fit(lengths, order, max_samples, limit)
    bins = _lightest_first(lengths, order, max_samples, limit, _whole(len(first_fit), num_ranks)) or first_fit
    return _deal(bins, num_ranks, lambda bin_: sum(lengths[i] for i in bin_))


def _whole(num_bins: int, num_ranks: int) -> int:
    """The next multiple of the ranks."""
    return -(-num_bins // num_ranks) * num_ranks


def _first_fit(lengths: Sequence[int], order: Sequence[int], max_samples: int, limit: int) -> Bins:
    """First-fit-decreasing: few bins, the last of them nearly empty."""
    bins: Bins = []
    room = np.zeros(len(lengths), dtype=np.int64)  # tokens that still fit into each bin, -1 when it has all its samples
    for index in order:
        fits = room[: len(bins)] >= lengths[index]
        if fits.any():
            place = int(fits.argmax())
        else:
            place = len(bins)
            bins.append([])
            room[place] = limit
        bins[place].append(index)
        room[place] = room[place] - lengths[index] if len(bins[place]) < max_samples else -1
    return bins


def _lightest_first(
    lengths: Sequence[int], order: Sequence[int], max_samples: int, limit: int, num_bins: int
) -> Bins | None:
    """Longest sample to the lightest of so many bins: even bins, or None where a limit is too tight for that."""
    bins: Bins = [[] for _ in range(num_bins)]
    open_bins = [(0, place) for place in range(num_bins)]  # a heap of (tokens, bin); a bin with all its samples is not
    for index in order:
        if not open_bins or open_bins[0][0] + lengths[index] > limit:
            return None
        tokens, place = heappop(open_bins)
        bins[place].append(index)
        if len(bins[place]) < max_samples:
            heappush(open_bins, (tokens + lengths[index], place))
    return bins


def _cut_rows(lengths: Sequence[int], order: Sequence[int], max_samples: int, limit: int) -> Bins:
    """Runs of samples of like length, each as long as the limits allow, which makes the fewest that there can be."""
    bins: Bins = []
    start = 0
    while start < len(order):
        num_rows = min(max_samples, limit // lengths[order[start]])
        bins.append(list(order[start : start + num_rows]))
        start += num_rows
    return bins


def _cut_evenly(lengths: Sequence[int], order: Sequence[int], max_samples: int, limit: int, num_bins: int) -> Bins:
    """`_cut_rows` under the smallest limit that makes at most `num_bins`."""
    low, high = lengths[order[0]], limit
    while low < high:
        middle = (low + high) // 2
        if len(_cut_rows(lengths, order, max_samples, middle)) <= num_bins:
            high = middle
        else:
            low = middle + 1
    return _cut_rows(lengths, order, max_samples, high)


def _deal(bins: Bins, num_ranks: int, cost: Callable[[list[int]], int]) -> list[Bins]:
    """Bins of like cost to all ranks at a time, heaviest first; in each round the lightest rank gets the heaviest."""
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
