"""Keep samples that share a prefix together in micro-batches, and cut such pieces where a limit asks for it.

A piece holds samples of one group (of one prompt, or of one unit) that begin with the same tokens; a sample that shares
nothing is a piece of its own. A piece's cost is its number of tokens with shared ones counted once. A piece is cut only
if it exceeds the tokens of a micro-batch, or if data-parallel ranks or pipeline stages would wait longer for it whole.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from coati_rl.batching.balance import Bins, assign_to_bins, lockstep_cost
from coati_rl.batching.prefix_tree import build_tree
from coati_rl.samples import Sample

MAX_WAITING = 1.05  # tokens that all ranks could compute while the slowest does, over those they have, before a cut


class Piece(NamedTuple):
    """Samples that share prefixes with each other."""

    samples: list[int]  # by their number among all; in the order of their tree where it was cut out of a larger piece
    num_tokens: int  # shared ones counted once


def assign_pieces(
    samples: Sequence[Sample],
    *,
    num_ranks: int,
    max_samples: int,
    max_tokens: int | None,
    unit: int,
    num_stages: int = 1,
) -> tuple[list[Piece], list[Bins]]:
    """Cut samples into pieces and assign these to micro-batches.

    Args:
        samples: of all ranks.
        num_ranks: data-parallel ranks.
        max_samples: per micro-batch; a piece with more is alone in its own.
        max_tokens: per micro-batch, shared ones counted once; None for no limit.
        unit: see `plan_batches`; a unit of several samples is a piece, and is never cut.
        num_stages: of the pipeline; with fewer micro-batches some of them always wait.
    Returns: the pieces, and [rank][k], the pieces in the rank's k-th micro-batch. A piece that exceeds `max_tokens`
        is a single unit.
    """
    tokens = [np.concatenate([sample.prefix_ids, sample.token_ids]) for sample in samples]
    if unit > 1:
        whole = [_piece(tokens, [*range(start, start + unit)]) for start in range(0, len(samples), unit)]
    else:
        whole = _whole_pieces(samples, tokens)
        if max_tokens is not None:
            whole = [part for piece in whole for part in _within(tokens, piece, max_tokens)]

    def assign(pieces: list[Piece]) -> tuple[int, list[Piece], list[Bins]]:
        lengths, sizes = [piece.num_tokens for piece in pieces], [len(piece.samples) for piece in pieces]
        ranks = assign_to_bins(
            lengths, num_ranks=num_ranks, max_samples=max_samples, max_tokens=max_tokens, sizes=sizes
        )
        return lockstep_cost(ranks, lengths, num_stages=num_stages), pieces, ranks

    choices = [assign(whole)]
    lengths, ranks = [piece.num_tokens for piece in whole], choices[0][2]
    cuts = list[tuple[int, int]]()  # so many of the largest pieces, into so many parts each
    if unit == 1 and lockstep_cost(ranks, lengths) * num_ranks > MAX_WAITING * sum(lengths):
        # All pieces, or those that are left over when each rank has as many as the others; the largest, as they are the
        # longest to be waited for.
        cuts += [(number, num_ranks) for number in sorted({len(whole) % num_ranks, len(whole)} - {0})]
    if unit == 1 and 0 < len(ranks[0]) < num_stages:
        most = -(-num_stages * num_ranks // len(whole))
        cuts += [(len(whole), num_parts) for num_parts in range(2, most + 1)]
    for number, num_parts in dict.fromkeys(cuts):
        pieces = _cut_largest(tokens, whole, number=number, num_parts=num_parts)
        if len(pieces) > len(whole):
            choices.append(assign(pieces))
    _, pieces, ranks = min(choices, key=lambda choice: choice[0])  # the first of equals, with the fewest cuts
    return pieces, ranks


def _whole_pieces(samples: Sequence[Sample], tokens: Sequence[np.ndarray]) -> list[Piece]:
    """Return the pieces of each group, which consecutive samples of one uid are."""
    pieces = []
    for _, of_group in groupby(range(len(samples)), key=lambda index: samples[index].uid):
        group = [*of_group]
        tree = build_tree([tokens[index] for index in group])
        by_root: dict[int, list[int]] = {}
        for number, index in enumerate(group):
            by_root.setdefault((tree.path(number) or [-1 - number])[0], []).append(index)
        if len(by_root) == 1:
            pieces.append(Piece(group, tree.num_tokens))
        else:
            pieces += [_piece(tokens, members) for members in by_root.values()]
    return pieces


def _piece(tokens: Sequence[np.ndarray], members: list[int]) -> Piece:
    return Piece(members, build_tree([tokens[index] for index in members]).num_tokens)


def _in_tree_order(tokens: Sequence[np.ndarray], piece: Piece) -> list[int]:
    """Return the samples so that those with more in common are closer to each other."""
    ends = build_tree([tokens[index] for index in piece.samples]).ends
    return [index for _, index in sorted(zip(ends, piece.samples, strict=True))]


def _within(tokens: Sequence[np.ndarray], piece: Piece, max_tokens: int) -> list[Piece]:
    """Cut a piece into the largest that hold at most so many tokens, or a single sample."""
    if piece.num_tokens <= max_tokens:
        return [piece]
    parts = list[Piece]()
    for index in _in_tree_order(tokens, piece):
        longer = _piece(tokens, [*parts[-1].samples, index]) if parts else None
        if longer is None or longer.num_tokens > max_tokens:
            parts.append(_piece(tokens, [index]))
        else:
            parts[-1] = longer
    return parts


def _cut_largest(tokens: Sequence[np.ndarray], pieces: list[Piece], *, number: int, num_parts: int) -> list[Piece]:
    """Cut so many of the largest pieces into at most `num_parts` each; the others stay whole."""
    largest = sorted(range(len(pieces)), key=lambda place: (-pieces[place].num_tokens, place))[:number]
    chosen = {*largest}
    return [
        part
        for place, piece in enumerate(pieces)
        for part in (_evenly(tokens, piece, num_parts) if place in chosen else [piece])
    ]


def _evenly(tokens: Sequence[np.ndarray], piece: Piece, num_parts: int) -> list[Piece]:
    """Cut a piece into parts of about as many tokens that are not shared by all of it."""
    order = _in_tree_order(tokens, piece)
    shared = min(len(tokens[index]) for index in order)
    weights = np.cumsum([1 + len(tokens[index]) - shared for index in order])
    part_of = (weights - 1) * num_parts // weights[-1]
    parts = groupby(zip(part_of.tolist(), order, strict=True), key=lambda pair: pair[0])
    return [_piece(tokens, [index for _, index in members]) for _, members in parts]
