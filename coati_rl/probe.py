"""Define an engine's answer to a probe: the tokens whose log-probabilities verify a weight sync."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeAnswer:
    """Hold what an engine computed of T tokens under its serving weights."""

    logprobs: np.ndarray  # float32[T - 1], of the tokens after the first, nats; empty from an engine that has none
    routes: np.ndarray | None = None  # uint[T, D, K], see `coati_rl.routes`; None from an engine that returns none
