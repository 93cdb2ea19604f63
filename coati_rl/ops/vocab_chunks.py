"""Compute logits and softmax of chunks of tokens, for every path through the LM head.

At most float32[C, V] logits exist, in one reused buffer: at V = 151,936 the logits of all tokens would be the largest
tensor of the training step.

Letters: R rows, L tokens per row, M loss tokens per row, H hidden size, V vocabulary, N requested tokens, C tokens of a
chunk, z logits over temperature. Under tensor parallelism V is the vocabulary of one rank: each holds the logits of its
rows of the LM head alone, and ranks exchange numbers per token, not per vocabulary entry.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from coati_rl.ops.compiled import Compiled
from coati_rl.ops.cpu_products import linear_into
from coati_rl.ops.host_copies import on_device

# Logits of a chunk, C * V, by device type: smaller chunks make matrix products slower, larger ones need memory. 64 MiB
# in float32 on a CPU; 1 GiB on a GPU, most of which products of 110 rows leave idle: on an H200 2^24 took 3.3 times as
# long as 2^26 (docs/performance.md).
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}
ROW_MULTIPLE = 16  # of tokens in a chunk: matrix products of 96 or 112 rows take 4 % less time per row than of 110
BLOCK_ELEMENTS = 2**20  # of temporaries of the logits on a CPU: 4 MiB, which fit its cache


class SharedSources(NamedTuple):
    """Say how rows of the N requested tokens add up by their source: in reading order, as `sum_rows` does.

    S sources that predict a token, K of them several.
    """

    first: Tensor  # int64[S], the number of each source's first token, 0 to N - 1
    places: Tensor  # int64[S], the source, into the R * L hidden states
    several: Tensor  # int64[K], into the S
    later: tuple[tuple[Tensor, Tensor], ...]  # of their second tokens, third ones, ...: the number, and where in the K


class TokenChoice(NamedTuple):
    """Hold where the N requested tokens are, in reading order."""

    places: Tensor  # int64[N], into the R * M entries of the loss arrays
    sources: Tensor  # int64[N], into the R * L hidden states: the one that predicts the token; may repeat
    sharing: SharedSources

    def to(self, device: torch.device) -> "TokenChoice":
        """Copy it to a device, in one transfer that the host does not wait for."""
        if device.type == "cpu":
            return self
        first, places, several, later = self.sharing
        parts = [self.places, self.sources, first, places, several, *(part for pair in later for part in pair)]
        joined = on_device(torch.cat(parts), device)
        of_places, of_sources, first, places, several, *rest = torch.split(joined, [len(part) for part in parts])
        pairs = tuple(zip(rest[::2], rest[1::2], strict=True))
        return TokenChoice(of_places, of_sources, SharedSources(first, places, several, pairs))


class ChosenTokens(NamedTuple):
    """Hold the N requested tokens, in reading order."""

    places: Tensor  # int64[N], into the R * M entries of the loss arrays
    sources: Tensor  # int64[N], into the R * L hidden states: the one that predicts the token; may repeat
    sharing: SharedSources
    targets: Tensor  # int64[N], token ids
    temperature: Tensor  # float32[N]


def token_choice(token_mask: NDArray[np.bool_], sources: NDArray[np.int64], *, length: int) -> TokenChoice:
    """Find the tokens at which `token_mask` is True, on the host: a device would have to be waited for.

    Args:
        token_mask: bool[R, M].
        sources: int64[R, M], the place in its row, 0 to L - 1, of the hidden state that predicts the token.
        length: L.
    Raises: ValueError if a requested token has no hidden state in its row.
    """
    (places,) = token_mask.ravel().nonzero()
    in_row = sources.ravel()[places]
    if ((in_row < 0) | (in_row >= length)).any():
        raise ValueError(f"token_mask is True on a token whose source is not a place in its row, 0 to {length - 1}")
    of_tokens = places // max(token_mask.shape[1], 1) * length + in_row
    order = of_tokens.argsort(kind="stable")
    found, starts, counts = np.unique(of_tokens[order], return_index=True, return_counts=True)
    (several,) = (counts > 1).nonzero()
    later = []
    for number in range(1, int(counts.max(initial=1))):
        (among,) = (counts[several] > number).nonzero()
        later.append((_int64(order[starts[several[among]] + number]), _int64(among)))
    sharing = SharedSources(_int64(order[starts]), _int64(found), _int64(several), tuple(later))
    return TokenChoice(_int64(places), _int64(of_tokens), sharing)


def _int64(array: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


def choose_tokens(
    hidden: Tensor,
    token_ids: Tensor,
    sources: Tensor,
    token_mask: Tensor,
    temperature: Tensor,
    choice: TokenChoice | None = None,
) -> ChosenTokens:
    """Select the tokens of the loss arrays [R, M] at which `token_mask` is True.

    Args:
        hidden: [R, L, H].
        token_ids: int64[R, M], the tokens to be predicted.
        sources: int64[R, M], the place in its row, 0 to L - 1, of the hidden state that predicts the token.
        token_mask: bool[R, M].
        temperature: float32[R, M].
        choice: that `token_choice` has made of mask and sources; None: it is made here, which waits for the device.
    Raises: ValueError if shapes do not fit together or a requested token has no hidden state in its row.
    """
    rows, length = hidden.shape[:2]
    shapes = [tuple(t.shape) for t in (token_ids, sources, token_mask, temperature)]
    if len(set(shapes)) > 1 or shapes[0][:1] != (rows,):
        raise ValueError(
            f"token_ids, sources, token_mask and temperature must agree on [{rows}, M], hidden's rows, not {shapes}"
        )
    if choice is None:
        choice = token_choice(token_mask.cpu().numpy(), sources.cpu().numpy(), length=length).to(hidden.device)
    return ChosenTokens(
        *choice, targets=token_ids.flatten()[choice.places], temperature=temperature.flatten()[choice.places]
    )


def sum_rows(rows: Tensor, sharing: SharedSources, *, length: int) -> Tensor:
    """Sum rows [N, H] by their source into [length, H]; always in the same order, and at least in float32.

    `index_add_` adds atomically on a GPU, in an order that changes from run to run. Here the rows of sources that have
    several are added in passes, at most one to each source; there are as many passes as the most frequent one has rows.
    """
    total = rows.new_zeros((length, rows.shape[1])).index_copy_(0, sharing.places, rows[sharing.first])
    if not sharing.later:
        return total
    sums = rows[sharing.first[sharing.several]].to(torch.promote_types(rows.dtype, torch.float32))
    for numbers, among in sharing.later:
        sums.index_copy_(0, among, sums[among] + rows[numbers])
    return total.index_copy_(0, sharing.places[sharing.several], sums.to(rows.dtype))


class ChunkSoftmax(NamedTuple):
    """Hold the softmax of a chunk over the whole vocabulary."""

    exponentials: Tensor  # float32[C, V], exp(z - peak), not divided by their total; in the memory of the logits
    total: Tensor  # float32[C], sum of the exponentials
    log_normaliser: Tensor  # float32[C], log sum exp z
    logprobs: Tensor  # float32[C], of the targets, nats
    entropy: Tensor  # float32[C], nats


@dataclass(frozen=True, kw_only=True, slots=True)
class LMHead:
    """Hold an LM head, or with a group this rank's rows of it: rank * V to (rank + 1) * V."""

    weight: Tensor  # [V, H], float32 or bfloat16
    bias: Tensor | None  # [V]
    group: dist.ProcessGroup | None

    def new_buffer(self, num_tokens: int, chunk_elements: int | None) -> Tensor:
        """Allocate float32[C, V], uninitialised, with C * V <= chunk_elements where C > 1, and C at most num_tokens.

        `chunk_elements` None means the device's CHUNK_ELEMENTS.
        """
        # One buffer, as the C library returns large tensors to the system and gets them back page by page.
        vocabulary = self.weight.shape[0]
        if chunk_elements is None:
            chunk_elements = CHUNK_ELEMENTS[self.weight.device.type]
        num_rows = max(1, chunk_elements // vocabulary)
        if num_rows > ROW_MULTIPLE:
            num_rows -= num_rows % ROW_MULTIPLE
        return torch.empty((min(num_rows, num_tokens), vocabulary), dtype=torch.float32, device=self.weight.device)

    def logits(self, hidden: Tensor, temperature: Tensor, buffer: Tensor) -> Tensor:
        """Compute float32[C, V] logits in the buffer: in the model's dtype, as inference engines do, then divided."""
        return linear_into(buffer[: len(hidden)], hidden, self.weight, self.bias).div_(temperature[:, None])

    def softmax(self, logits: Tensor, targets: Tensor) -> ChunkSoftmax:
        """Compute the softmax in the memory of float32[C, V] logits, which it overwrites. Collective over the group."""
        # All ranks have the same bits, as every number that depends on several rows of the head is reduced.
        peak = self._reduced(logits.amax(dim=-1), dist.ReduceOp.MAX)  # float32[C]
        columns, is_held = self._columns(targets)
        of_target = (logits.gather(-1, columns[:, None]).squeeze(-1) - peak).where(is_held, 0.0)
        total, moment = torch.empty_like(peak), torch.empty_like(peak)
        for block in row_blocks(logits):
            total[block], moment[block] = _take_exponentials.where_enabled(logits[block], peak[block])
        total, moment, of_target = self._reduced(torch.stack([total, moment, of_target]), dist.ReduceOp.SUM)
        log_total = total.log()
        return ChunkSoftmax(
            exponentials=logits,
            total=total,
            log_normaliser=peak + log_total,
            logprobs=of_target - log_total,
            entropy=log_total - moment / total,  # -sum p log p with log p = shifted - log_total
        )

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Compute float32[C, V] log softmax over the whole vocabulary, in place. Collective over the group."""
        peak = logits.amax(dim=-1)
        logits.sub_(self._reduced(peak, dist.ReduceOp.MAX)[:, None])
        total = torch.cat([logits[block].exp().sum(dim=-1) for block in row_blocks(logits)])
        return logits.sub_(self.reduced(total).log()[:, None])

    def add_to_targets(self, logits: Tensor, targets: Tensor, values: Tensor) -> Tensor:
        """Add float32[C] `values` in place to float32[C, V] `logits` at the targets. Returns: `logits`."""
        columns, is_held = self._columns(targets)
        return logits.scatter_add_(-1, columns[:, None], values.where(is_held, 0.0)[:, None])

    def _columns(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return int64[C] columns of this rank's logits, and bool[C], False (column 0) for other ranks' targets."""
        if self.group is None:  # a token id out of range is then an error of gather, not another rank's
            return targets, torch.ones_like(targets, dtype=torch.bool)
        columns = targets - dist.get_rank(self.group) * self.weight.shape[0]
        is_held = (columns >= 0) & (columns < self.weight.shape[0])
        return columns.where(is_held, 0), is_held

    def reduced(self, values: Tensor) -> Tensor:
        """Sum values over the group in place; they are already whole without one."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, op, self.group)
        return values


def _exponentials(logits: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """Replace float32[C, V] logits by exp(z - peak). Returns: float32[C] sums of them, and of (z - peak) times them."""
    shifted = logits.sub_(peak[:, None])
    exponentials = shifted.exp()
    total = exponentials.sum(dim=-1)
    moment = shifted.mul_(exponentials).sum(dim=-1)
    shifted.copy_(exponentials)
    return total, moment


_take_exponentials = Compiled(_exponentials, (0, 0))


def check_compiled(device: torch.device) -> None:
    """Compile what is compiled of a chunk's computation. Raises: what `Compiled.check` raises."""
    logits = torch.randn(ROW_MULTIPLE, 512, generator=torch.Generator().manual_seed(0)).to(device)
    _take_exponentials.check(logits, logits.amax(dim=-1))


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Yield rows of float32[C, V] in blocks that fit a CPU's cache; all at once on a GPU."""
    # There many small kernel launches would cost more than the saved memory is worth.
    return slices(len(logits), len(logits) if logits.is_cuda else max(1, BLOCK_ELEMENTS // logits.shape[1]))


def slices(length: int, size: int) -> Iterator[slice]:
    """Yield slices of `size` from 0 to `length`, the last perhaps shorter."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
