"""Find the prefixes that samples share, as a tree whose tokens are computed once.

A node holds consecutive tokens of one or several samples. Its parent holds the tokens before them, so that a sample is
the path from a root to the node that it ends in. Forked episodes branch inside a response, and copies end in the same
node.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Tokens. For fewer a node of their own is not worth its call to the attention kernel; samples compute them themselves.
MIN_SHARED = 8


class PrefixNode(NamedTuple):
    """Tokens [start, stop) of a sample."""

    sample: int  # the first of those that have these tokens and all before them
    start: int
    stop: int
    parent: int  # its number in the tree; -1 of a root


class PrefixTree(NamedTuple):
    """The nodes depth first, each before those that go on from it."""

    nodes: Sequence[PrefixNode]
    ends: Sequence[int]  # of each sample, the number of the node that holds its last token; -1 of an empty sample

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all nodes."""
        return sum(node.stop - node.start for node in self.nodes)

    def path(self, sample: int) -> list[int]:
        """Return the numbers of a sample's nodes, the root first."""
        path, number = list[int](), self.ends[sample]
        while number >= 0:
            path.append(number)
            number = self.nodes[number].parent
        return path[::-1]


def build_tree(samples: Sequence[np.ndarray]) -> PrefixTree:
    """Build the tree of samples, int[T] token ids each; samples without a common prefix have roots of their own."""
    nodes, ends = list[PrefixNode](), [-1] * len(samples)
    # Samples that agree up to a place, the first token that is in no node yet, that place, and the node before.
    waiting = [([*range(len(samples))], 0, 0, -1)]
    while waiting:
        members, start, known, parent = waiting.pop()
        stop = _agreement(samples, members, known)
        is_opened = stop > start if len(members) == 1 else stop - start >= MIN_SHARED
        if is_opened:
            nodes.append(PrefixNode(members[0], start, stop, parent))
            start, parent = stop, len(nodes) - 1
        branches: dict[int, list[int]] = {}
        for member in members:
            if stop < len(samples[member]):
                branches.setdefault(int(samples[member][stop]), []).append(member)
            elif is_opened or len(members) == 1:
                ends[member] = parent
            else:
                branches[-1 - member] = [member]
        waiting += [(branch, start, stop, parent) for branch in reversed(branches.values())]
    return PrefixTree(nodes, ends)


def _agreement(samples: Sequence[np.ndarray], members: Sequence[int], known: int) -> int:
    """Return the number of tokens in which the members agree, at least `known`."""
    first = samples[members[0]]
    stop = min(len(samples[member]) for member in members)
    for member in members[1:]:
        differs = samples[member][known:stop] != first[known:stop]
        if differs.any():
            stop = known + int(differs.argmax())
    return stop
