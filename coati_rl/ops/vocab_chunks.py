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

import torch
import torch.distributed as dist
from torch import Tensor

from coati_rl.ops.cpu_products import linear_into

# Logits of a chunk, C * V, by device type: smaller chunks make matrix products slower, larger ones need memory. 64 MiB
# in float32 on a CPU; 1 GiB on a GPU, where products of 110 rows leave most of it idle (by arithmetic, not measured).
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}
ROW_MULTIPLE = 16  # of tokens in a chunk: matrix products of 96 or 112 rows take 4 % less time per row than of 110
BLOCK_ELEMENTS = 2**20  # of temporaries of the logits on a CPU: 4 MiB, which fit its cache


class ChosenTokens(NamedTuple):
    """Hold the N requested tokens, in reading order."""

    places: Tensor  # int64[N], into the R * M entries of the loss arrays
    sources: Tensor  # int64[N], into the R * L hidden states: the one that predicts the token; may repeat
    targets: Tensor  # int64[N], token ids
    temperature: Tensor  # float32[N]


def choose_tokens(
    hidden: Tensor, token_ids: Tensor, sources: Tensor, token_mask: Tensor, temperature: Tensor
) -> ChosenTokens:
    """Select the tokens of the loss arrays [R, M] at which `token_mask` is True.

    Args:
        hidden: [R, L, H].
        token_ids: int64[R, M], the tokens to be predicted.
        sources: int64[R, M], the place in its row, 0 to L - 1, of the hidden state that predicts the token.
        token_mask: bool[R, M].
        temperature: float32[R, M].
    Raises: ValueError if shapes do not fit together or a requested token has no hidden state in its row.
    """
    rows, length = hidden.shape[:2]
    shapes = [tuple(t.shape) for t in (token_ids, sources, token_mask, temperature)]
    if len(set(shapes)) > 1 or shapes[0][:1] != (rows,):
        raise ValueError(
            f"token_ids, sources, token_mask and temperature must agree on [{rows}, M], hidden's rows, not {shapes}"
        )
    places = token_mask.flatten().nonzero().squeeze(-1)
    in_row = sources.flatten()[places]
    if ((in_row < 0) | (in_row >= length)).any():
        raise ValueError(f"token_mask is True on a token whose source is not a place in its row, 0 to {length - 1}")
    first_of_row = places // token_mask.shape[1] * length if len(places) else places
    return ChosenTokens(places, first_of_row + in_row, token_ids.flatten()[places], temperature.flatten()[places])


def sum_rows(rows: Tensor, index: Tensor, *, length: int) -> Tensor:
    """Sum rows [N, H] by their place, int64[N], into [length, H]; always in the same order, and at least in float32.

    `index_add_` adds atomically on a GPU, in an order that changes from run to run. Here the rows of places that have
    several are added in passes, at most one to each place; there are as many passes as the most frequent one has rows.
    """
    order = index.argsort(stable=True)
    ordered = index[order]
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    places = ordered[is_first]
    total = rows.new_zeros((length, rows.shape[1])).index_copy_(0, places, rows[order[is_first]])
    if is_first.all():
        return total
    numbers = torch.arange(len(ordered), device=index.device)
    repeat = numbers - torch.where(is_first, numbers, 0).cummax(dim=0).values  # rows of the same place before it
    of_place = is_first.cumsum(dim=0) - 1
    has_several = of_place.bincount() > 1
    is_added = has_several[of_place]
    added, sum_of, repeat = order[is_added], (has_several.cumsum(dim=0) - 1)[of_place[is_added]], repeat[is_added]
    dtype = torch.promote_types(rows.dtype, torch.float32)
    sums = rows.new_zeros((int(has_several.sum()), rows.shape[1]), dtype=dtype)
    for number in range(int(repeat.max()) + 1):
        chosen = repeat == number
        sums.index_copy_(0, sum_of[chosen], sums[sum_of[chosen]] + rows[added[chosen]])
    return total.index_copy_(0, places[has_several], sums.to(rows.dtype))


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
        logits.sub_(peak[:, None])
        columns, is_held = self._columns(targets)
        of_target = logits.gather(-1, columns[:, None]).squeeze(-1).where(is_held, 0.0)
        total, moment = torch.empty_like(peak), torch.empty_like(peak)
        for block in row_blocks(logits):
            shifted = logits[block]
            exponentials = shifted.exp()
            total[block] = exponentials.sum(dim=-1)
            moment[block] = shifted.mul_(exponentials).sum(dim=-1)
            shifted.copy_(exponentials)
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


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Yield rows of float32[C, V] in blocks that fit a CPU's cache; all at once on a GPU."""
    # There many small kernel launches would cost more than the saved memory is worth.
    return slices(len(logits), len(logits) if logits.is_cuda else max(1, BLOCK_ELEMENTS // logits.shape[1]))


def slices(length: int, size: int) -> Iterator[slice]:
    """Yield slices of `size` from 0 to `length`, the last perhaps shorter."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
