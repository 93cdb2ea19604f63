"""Check requests, and cut them into pieces, which are what is computed at once of one model.

A piece holds some sequences of one request. Each sequence is padded to a multiple of 8 tokens, the piece to one of 32.
Which sequences a piece holds, their order and their padding depend on the request alone, and a pass computes at most
one piece of each model: so no product, sum or order of sums depends on the other models' requests. N tokens of a
sequence, K targets of a position, L padded tokens of a piece, M targets of a piece.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coati_rl.tinker.core import Datum, LossRequest, RequestError
from consumer.objectives.tinker_losses import INPUTS, OPTIONAL, TinkerLoss, tinker_loss

SEQUENCE_MULTIPLE, PIECE_MULTIPLE = 8, 32  # tokens: whole vectors of a CPU, so that no row is in a remainder


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Hold sequences of one request, laid out one after another."""

    model: str  # empty: a blank piece, which has no targets
    request: int  # its number in the call
    data: tuple[int, ...]  # numbers of its sequences in the request
    loss: TinkerLoss
    token_ids: npt.NDArray[np.int64]  # [L]
    lengths: tuple[int, ...]  # padded, of its sequences; they add up to L
    num_targets: tuple[int, ...]  # N * K of its sequences; they add up to M
    width: int  # K
    sources: npt.NDArray[np.int64]  # [M / K], the place of each position that has targets
    targets: npt.NDArray[np.int64]  # [M]
    arrays: Mapping[str, npt.NDArray[np.float32]]  # [M] each, the loss's inputs


def check_request(request: LossRequest, *, max_tokens: int, vocab_size: int) -> TinkerLoss:
    """Return a request's loss. Raises: RequestError, naming field, value and remedy, if it cannot be computed."""
    loss = tinker_loss(request.loss, request.settings)
    if not request.data:
        raise RequestError("data: is empty; send at least one datum")
    for number, datum in enumerate(request.data):
        _check_datum(datum, f"data[{number}]", loss.name, max_tokens=max_tokens, vocab_size=vocab_size)
    return loss


def _check_datum(datum: Datum, where: str, loss: str, *, max_tokens: int, vocab_size: int) -> None:
    length = len(datum.tokens)
    if datum.tokens.ndim != 1 or not 0 < length <= max_tokens:
        raise RequestError(f"{where}: has {length} tokens; send 1 to {max_tokens}")
    needed = ("target_tokens", *(name for name in INPUTS[loss] if name not in OPTIONAL))
    if missing := [name for name in needed if name not in datum.inputs]:
        raise RequestError(f"{where}: {loss} needs loss_fn_inputs[{missing[0]!r}]")
    known = {"target_tokens", *INPUTS[loss]}
    targets = datum.inputs["target_tokens"]
    if targets.ndim not in (1, 2) or targets.shape[0] != length or targets.size == 0:
        raise RequestError(f"{where}: target_tokens has the shape {targets.shape}; use ({length},) or ({length}, K)")
    if targets.ndim == 2 and loss != "cross_entropy":
        raise RequestError(f"{where}: {loss} has one target a token; send target_tokens of the shape ({length},)")
    for what, ids in (("tokens", datum.tokens), ("target_tokens", targets)):
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab_size:
            raise RequestError(f"{where}: {what} has an id outside 0..{vocab_size - 1}; use the model's own tokenizer")
    for name in known & datum.inputs.keys() - {"target_tokens"}:
        value = datum.inputs[name]
        if value.shape != targets.shape:
            raise RequestError(f"{where}: {name} has the shape {value.shape}; use target_tokens' {targets.shape}")
        if not np.isfinite(value).all():
            raise RequestError(f"{where}: {name} has a value that is not finite; send finite numbers")


def shares(data: Sequence[Datum], dp_size: int) -> list[list[int]]:
    """Share a request's sequences out to data-parallel ranks, by their lengths alone.

    Returns: numbers of sequences of each rank, ascending. Which rank has most changes with the lengths.
    """
    bins: list[list[int]] = [[] for _ in range(dp_size)]
    totals = [0] * dp_size
    first = sum(len(datum.tokens) for datum in data) % dp_size
    for number in sorted(range(len(data)), key=lambda each: (-len(data[each].tokens), each)):
        rank = min(range(dp_size), key=lambda each: (totals[each], (each - first) % dp_size))
        totals[rank] += len(data[number].tokens)
        bins[rank].append(number)
    return [sorted(each) for each in bins]


def cut(request: LossRequest, number: int, chosen: Sequence[int], loss: TinkerLoss, *, max_tokens: int) -> list[Piece]:
    """Cut a request's chosen sequences into pieces of at most `max_tokens`, or of one longer sequence."""
    pieces, batch, size, width = list[Piece](), list[int](), 0, 1
    for index in chosen:
        padded, own_width = _padded(len(request.data[index].tokens), SEQUENCE_MULTIPLE), _width(request.data[index])
        if batch and (size + padded > max_tokens or own_width != width):
            pieces.append(_piece(request, number, batch, loss))
            batch, size = [], 0
        batch.append(index)
        size, width = size + padded, own_width
    return [*pieces, _piece(request, number, batch, loss)] if batch else pieces


def blank_piece() -> Piece:
    """Return a piece without targets, for a rank that takes part in the others' pass."""
    empty = np.zeros(0, np.int64)
    return Piece(
        model="",
        request=-1,
        data=(),
        loss=TinkerLoss(name="cross_entropy"),
        token_ids=np.zeros(PIECE_MULTIPLE, np.int64),
        lengths=(PIECE_MULTIPLE,),
        num_targets=(),
        width=1,
        sources=empty,
        targets=empty,
        arrays={},
    )


def passes(pieces: Sequence[Piece], *, max_tokens: int) -> list[list[Piece]]:
    """Put pieces of different models together, each model's in their order, one of a model in a pass.

    Args:
        pieces: of all requests, in the order of these.
        max_tokens: of a pass, padding included; a longer piece is alone.
    Returns: the pieces of each pass, those of equal size beside each other.
    """
    rounds = list[list[Piece]]()
    seen = dict[str, int]()
    for piece in pieces:
        place = seen[piece.model] = seen.get(piece.model, -1) + 1
        if place == len(rounds):
            rounds.append([])
        rounds[place].append(piece)
    found = list[list[Piece]]()
    for each in rounds:
        size = max_tokens
        for piece in sorted(each, key=lambda piece: (len(piece.token_ids), piece.model)):
            if size + len(piece.token_ids) > max_tokens:
                found.append([])
                size = 0
            found[-1].append(piece)
            size += len(piece.token_ids)
    return found


def _piece(request: LossRequest, number: int, batch: Sequence[int], loss: TinkerLoss) -> Piece:
    data = [request.data[index] for index in batch]
    counts = [len(datum.tokens) for datum in data]
    lengths = [_padded(count, SEQUENCE_MULTIPLE) for count in counts]
    lengths[-1] += -sum(lengths) % PIECE_MULTIPLE
    starts = np.cumsum([0, *lengths[:-1]])
    token_ids = np.zeros(sum(lengths), np.int64)
    sources = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    token_ids[sources] = np.concatenate([datum.tokens for datum in data])
    return Piece(
        model=request.model,
        request=number,
        data=tuple(batch),
        loss=loss,
        token_ids=token_ids,
        lengths=tuple(lengths),
        num_targets=tuple(datum.inputs["target_tokens"].size for datum in data),
        width=_width(data[0]),
        sources=sources,
        targets=_joined([datum.inputs["target_tokens"] for datum in data]).astype(np.int64),
        arrays={name: _joined([_input(datum, name) for datum in data]) for name in INPUTS[loss.name]},
    )


def _input(datum: Datum, name: str) -> npt.NDArray[Any]:
    found = datum.inputs.get(name)
    shape = datum.inputs["target_tokens"].shape
    return np.full(shape, OPTIONAL[name], np.float32) if found is None else found.astype(np.float32)


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate([array.reshape(-1) for array in arrays])


def _width(datum: Datum) -> int:
    return int(datum.inputs["target_tokens"].size // len(datum.tokens))


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
