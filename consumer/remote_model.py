"""Stand for a frozen model that scores in other processes, on devices of its own (--ref-devices).

Micro-batches go to the scorers in turns, the first of a data-parallel rank to the scorer of its number, so that each
request is the same in every run. Of ranks with the LM head that have the same samples, one asks and passes on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from coati_rl.batch import MicroBatch
from consumer.models.policy_model import HeadWeights, Output
from consumer.parallel.layout import Layout


class Scorers(Protocol):
    """Call the scorers of a run."""

    @property
    def count(self) -> int:
        """Return how many there are."""

    def score(
        self, requests: Sequence[tuple[int, Sequence[MicroBatch]]], role: str, output: Output
    ) -> list[list[np.ndarray]]:
        """Return the answers to requests, each to the scorer of a number. Raises: PeerLostError."""

    def head_weights(self, role: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the LM head's weights and bias in float32. Raises: PeerLostError."""


class RemoteModel:
    """Score as a frozen `RoleModel` would; methods are collective over the ranks that share samples."""

    def __init__(
        self, role: str, scorers: Scorers, layout: Layout, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Take the scorers. `dtype`: that the model computes in."""
        self._role, self._scorers, self._layout = role, scorers, layout
        self._device, self._dtype = device, dtype
        self._head: HeadWeights | None = None

    def score(self, micro_batches: Sequence[MicroBatch], output: Output) -> list[Tensor]:
        """Return the scores of each micro-batch; none without the LM head. Raises: PeerLostError."""
        if not self._layout.is_last_stage:
            return []
        answers: Any = self._passed_on(lambda: self._ask(micro_batches, output))
        return [torch.from_numpy(answer.copy()).to(self._device) for answer in answers]

    @contextmanager
    def head_weights(self) -> Iterator[HeadWeights | None]:
        """Provide this rank's rows of the LM head, which are asked for once; None without the head."""
        if self._head is None and self._layout.is_last_stage:
            weight, bias = self._passed_on(lambda: self._scorers.head_weights(self._role))
            self._head = HeadWeights(self._rows(weight), None if bias is None else self._rows(bias))
        yield self._head

    def _ask(self, micro_batches: Sequence[MicroBatch], output: Output) -> list[np.ndarray]:
        count, first = self._scorers.count, self._layout.data_rank
        shares = [range(number, len(micro_batches), count) for number in range(min(count, len(micro_batches)))]
        requests = [
            ((first + number) % count, [micro_batches[index] for index in share]) for number, share in enumerate(shares)
        ]
        answers = self._scorers.score(requests, self._role, output)
        found = dict[int, np.ndarray]()
        for share, part in zip(shares, answers, strict=True):
            found |= zip(share, part, strict=True)
        return [found[index] for index in range(len(micro_batches))]

    def _passed_on(self, ask: Any) -> Any:
        layout = self._layout
        box = [ask() if layout.tp_rank == layout.cp_rank == 0 else None]
        for group in (layout.cp_group, layout.tp_group):  # the first of each has it by then
            if group is not None:
                dist.broadcast_object_list(box, group=group, group_src=0, device=self._device)
        return box[0]

    def _rows(self, full: np.ndarray) -> Tensor:
        rows = torch.from_numpy(full.copy()).chunk(self._layout.tp_size)[self._layout.tp_rank]
        return rows.to(self._device, self._dtype)
