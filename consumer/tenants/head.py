"""Compute the losses of a pass's pieces from its last hidden states, and their gradients, without a second forward.

Logits are W h + s B A h with the head's own adapter, if the model has one. Pieces of a group are computed at once where
their logits fit the chunk, and else piece by piece in chunks of rows, whose size the vocabulary alone decides.
G pieces, m rows of each, H hidden size, V vocabulary of this rank, M targets of a piece, C rows of a chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from coati_rl.ops.fused_loss import StoredGradients
from coati_rl.ops.host_copies import on_device
from coati_rl.ops.vocab_chunks import CHUNK_ELEMENTS
from consumer.objectives.tinker_losses import loss_terms, sequence_log_ratios
from consumer.tenants.layers import Group, summed
from consumer.tenants.pieces import PIECE_MULTIPLE, Piece
from consumer.tenants.products import into_rank, times_own, times_shared, times_shared_back


@dataclass(frozen=True, slots=True)
class PieceResult:
    """Hold what a piece's request gets."""

    piece: Piece
    logprobs: Tensor  # float32[M] in nats, of its targets
    loss: Tensor  # float64[]


class TenantHead:
    """Compute a pass's losses; `results` holds them afterwards."""

    def __init__(self, groups: Sequence[Group], layer: str) -> None:
        """Take the pass's groups, and the head's name."""
        self._groups, self._layer = groups, layer
        self.results = list[PieceResult]()

    def __call__(
        self, model: Any, hidden: Tensor, tp_group: dist.ProcessGroup | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the pass's loss, whose gradient is stored, and nothing to report. `hidden`: [1, L, H]."""
        head, rows = model.get_output_embeddings(), hidden.flatten(0, 1)
        weight, bias = head.weight, head.bias
        wants_gradient = torch.is_grad_enabled()
        self.results.clear()
        gradient = torch.zeros_like(rows) if wants_gradient else None
        with torch.no_grad():
            for group in self._groups:
                for part in _parts(group, len(weight), rows.device):
                    of_part = None if gradient is None else part.of(gradient)
                    self.results += _Head(part, self._layer, weight, bias, tp_group).run(part.of(rows), of_part)
        loss = torch.zeros((), device=rows.device)
        if gradient is None:
            return loss, {}
        stored = StoredGradients.apply(rows, weight, None, loss, (gradient, None, None))
        return stored, {}


class _Head:
    """Compute a group's chunks."""

    def __init__(
        self, group: Group, layer: str, weight: Tensor, bias: Tensor | None, tp_group: dist.ProcessGroup | None
    ) -> None:
        self._group, self._layer, self._tp_group = group, layer, tp_group
        self._weight, self._bias = weight, bias
        self._a: Tensor | None = None
        self._b: Tensor | None = None
        if group.has(layer):
            self._a, self._b = group.stacked(layer, weight.dtype)

    def run(self, rows: Tensor, gradient: Tensor | None) -> list[PieceResult]:
        """Return the pieces' results of hidden states [G, m, H]; add their gradients, if wanted, to `gradient`."""
        pieces, size = self._group.pieces, _chunk_rows(len(self._weight), rows.device)
        chunks = [slice(start, min(start + size, self._group.rows)) for start in range(0, self._group.rows, size)]
        short = None
        if self._a is not None:
            short = into_rank(rows, self._a).mul_(self._group.scale)
        arrays = [{name: _copied(array, rows.device) for name, array in piece.arrays.items()} for piece in pieces]
        if len(chunks) > 1 and not pieces[0].loss.is_token_separable:  # one piece: see `_parts`
            parts = [self._softmax(rows, short, chunk)[0].logprobs for chunk in chunks]
            _add_sequence_ratios(pieces[0], torch.cat(parts), arrays[0])
        logprobs: list[list[Tensor]] = [[] for _ in pieces]
        losses: list[list[Tensor]] = [[] for _ in pieces]
        for chunk in chunks:
            softmax, spans = self._softmax(rows, short, chunk)
            found = []
            for number, (piece, span) in enumerate(zip(pieces, spans, strict=True)):
                own = softmax.logprobs[span.tokens]
                if not piece.loss.is_token_separable and "sequence_log_ratio" not in arrays[number]:
                    _add_sequence_ratios(piece, own, arrays[number])
                of_span = {name: array[span.targets] for name, array in arrays[number].items()}
                loss, grad = _loss_of(piece, own, of_span, wants_gradient=gradient is not None)
                logprobs[number].append(own)
                losses[number].append(loss)
                found.append(grad)
            if gradient is not None:
                short_rows = None if short is None else short[:, chunk]
                self._add_gradients(softmax, torch.cat(found), rows[:, chunk], short_rows, gradient[:, chunk])
        return [
            PieceResult(piece, torch.cat(own), torch.stack(terms).sum())
            for piece, own, terms in zip(pieces, logprobs, losses, strict=True)
        ]

    def _softmax(self, rows: Tensor, short: Tensor | None, chunk: slice) -> "tuple[_Softmax, list[_Span]]":
        """Compute the softmax of rows [G, C] of the vocabulary, and the log-probabilities of the targets there."""
        spans, places, targets = _spans_of(self._group.pieces, chunk)
        logits = times_shared(rows[:, chunk].contiguous(), self._weight, self._bias).float()
        if short is not None and self._b is not None:
            logits += times_own(short[:, chunk], self._b.transpose(1, 2))
        logits = logits.flatten(0, 1)
        token_rows, columns = _copied(places, rows.device), _copied(targets, rows.device)
        is_held = None
        if self._tp_group is not None:
            columns = columns - dist.get_rank(self._tp_group) * len(self._weight)
            is_held = (columns >= 0) & (columns < len(self._weight))
            columns = columns.where(is_held, 0)
        logits.sub_(self._reduced(logits.amax(dim=-1), dist.ReduceOp.MAX)[:, None])
        index = token_rows * len(self._weight) + columns
        of_target = logits.view(-1)[index]
        if is_held is not None:
            of_target = self._reduced(of_target.where(is_held, 0.0))
        total = self._reduced(logits.exp_().sum(dim=-1))
        logprobs = of_target - total.log()[token_rows]
        return _Softmax(logits, total, token_rows, index, is_held, logprobs), spans

    def _add_gradients(
        self, softmax: "_Softmax", of_tokens: Tensor, rows: Tensor, short: Tensor | None, gradient: Tensor
    ) -> None:
        """Add what follows from the gradients of the targets' log-probabilities, float32 of all pieces of a chunk."""
        # With p = softmax: d logprob / dz = one_hot(target) - p.
        of_rows = torch.zeros_like(softmax.total).index_add_(0, softmax.token_rows, of_tokens)
        grad_logits = softmax.exponentials.mul_((-of_rows / softmax.total)[:, None])
        held = of_tokens if softmax.is_held is None else of_tokens.where(softmax.is_held, 0.0)
        grad_logits.view(-1).index_add_(0, softmax.index, held)
        of_group = grad_logits.view(*gradient.shape[:2], -1).to(self._weight.dtype)
        gradient += self._reduced(times_shared_back(of_group, self._weight))
        if short is None or self._a is None or self._b is None:
            return
        grad_short = self._reduced(into_rank(of_group, self._b.transpose(1, 2))).mul_(self._group.scale)
        gradient += times_own(grad_short, self._a)
        grad_a = times_own(grad_short.transpose(1, 2), rows)
        grad_b = into_rank(of_group.transpose(1, 2), short.transpose(1, 2))
        self._group.add_gradients(self._layer, grad_a, grad_b)

    def _reduced(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        return summed(values, self._tp_group, op)


@dataclass(frozen=True, slots=True)
class _Softmax:
    """Hold a chunk's softmax over the vocabulary; the rows are those of all pieces, one after another."""

    exponentials: Tensor  # float32[G * C, V], exp(z - peak)
    total: Tensor  # float32[G * C]
    token_rows: Tensor  # int64[T], of each target
    index: Tensor  # int64[T], into the logits
    is_held: Tensor | None  # bool[T]: False of another rank's; None: all are held
    logprobs: Tensor  # float32[T]


@dataclass(frozen=True, slots=True)
class _Span:
    """Say which targets of a chunk are a piece's."""

    tokens: slice  # of the chunk's
    targets: slice  # of the piece's


def _spans_of(
    pieces: Sequence[Piece], chunk: slice
) -> tuple[list[_Span], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return each piece's targets in rows of the chunk; int64[T] rows of all pieces' chunks, and token ids."""
    spans, places, targets, start, size = list[_Span](), [], [], 0, chunk.stop - chunk.start
    for number, piece in enumerate(pieces):
        first, last = np.searchsorted(piece.sources, (chunk.start, chunk.stop))
        of_piece = slice(first * piece.width, last * piece.width)
        places.append(np.repeat(piece.sources[first:last] - chunk.start + number * size, piece.width))
        targets.append(piece.targets[of_piece])
        spans.append(_Span(slice(start, start + len(targets[-1])), of_piece))
        start += len(targets[-1])
    return spans, np.concatenate(places), np.concatenate(targets)


def _add_sequence_ratios(piece: Piece, logprobs: Tensor, arrays: dict[str, Tensor]) -> None:
    arrays["sequence_log_ratio"] = sequence_log_ratios(logprobs, arrays, piece.num_targets)


def _loss_of(
    piece: Piece, logprobs: Tensor, arrays: dict[str, Tensor], *, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss of targets, float64[], and its gradient, float32[M]; zeros if it is not wanted."""
    if not wants_gradient:
        return loss_terms(piece.loss, logprobs, arrays).double().sum(), torch.zeros_like(logprobs)
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        loss = loss_terms(piece.loss, leaf, arrays).double().sum()
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def _copied(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    return on_device(torch.from_numpy(array), device)


def _chunk_rows(vocabulary: int, device: torch.device) -> int:
    rows = CHUNK_ELEMENTS[device.type] // vocabulary
    return max(PIECE_MULTIPLE, rows - rows % PIECE_MULTIPLE)


def _parts(group: Group, vocabulary: int, device: torch.device) -> Iterator[Group]:
    """Yield a group as a whole if its logits fit a chunk, else its pieces; nothing of a blank one."""
    if not group.pieces[0].model:
        return
    if group.rows * len(group.pieces) <= _chunk_rows(vocabulary, device):
        yield group
        return
    for number, piece in enumerate(group.pieces):
        yield Group(group.start + number * group.rows, group.rows, (piece,), group.sets[number : number + 1])
