"""Hold what a rank has computed of a call's requests, in a form that crosses processes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from consumer.tenants.pieces import Piece


class RankResults:
    """Collect results of pieces."""

    def __init__(self) -> None:
        self.logprobs = list[tuple[int, int, Any]]()  # request, sequence, float32[N * K] in nats
        self.losses = list[tuple[int, float]]()  # request, summed loss of a piece

    def add(self, piece: Piece, logprobs: Tensor, loss: float) -> None:
        """Add a piece's, float32[M] in nats, and its loss."""
        parts: Sequence[np.ndarray] = np.split(logprobs.float().cpu().numpy(), np.cumsum(piece.num_targets)[:-1])
        self.logprobs += [(piece.request, number, part) for number, part in zip(piece.data, parts, strict=True)]
        self.losses.append((piece.request, loss))
