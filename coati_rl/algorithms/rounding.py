"""Bound the engine-trainer mismatch in bfloat16 by what rounding does to the trainer's own log-probabilities.

The same tokens are scored with the same weights by the engine (e), by the trainer in bfloat16 (t) and by the trainer in
float32 (f). |t - f| is the rounding of this model on these tokens. An engine rounds as much in other places: two
independent errors of one size are 1.4 of it apart. So the mean of |e - t| may be twice that of |t - f|, and the mean of
e - t is near 0, both with a statistical error. Decision 0047 has the measurements.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Self

import numpy as np

LARGEST = 0.3  # nats: no limit is larger, since an importance ratio is then off by a third
_SMALLEST = 1e-3  # nats: no limit is smaller; a few tokens of many round by much
_MIN_TOKENS = 32  # fewer do not tell how rounding spreads
_GAP_RATIO = 2.0  # mean |e - t| over mean |t - f|; 0.6 to 1.2 were measured
_SHIFT_RATIO = 0.25  # |mean (e - t)| over mean |t - f|; below 0.1 was measured
_NUM_DEVIATIONS = 4.0  # standard errors; tokens of a prompt's samples are not independent


@dataclass(frozen=True, slots=True)
class RoundingSums:
    """Hold sums over tokens that were scored in all three ways, in nats."""

    tokens: float = 0.0
    rounding: float = 0.0  # of |t - f|
    squares: float = 0.0  # of (t - f)^2
    shift: float = 0.0  # of e - t

    @classmethod
    def of(cls, engine: np.ndarray, trainer: np.ndarray, reference: np.ndarray) -> Self:
        """Sum over float32[N] log-probabilities of the engine, of the trainer, and of the trainer in float32."""
        exact = trainer.astype(np.float64)
        rounding, shift = np.abs(exact - reference), engine.astype(np.float64) - exact
        return cls(float(len(exact)), float(rounding.sum()), float((rounding**2).sum()), float(shift.sum()))

    @classmethod
    def total(cls, parts: Iterable["RoundingSums"]) -> Self:
        """Add up sums over different tokens."""
        return cls(*(sum(column) for column in zip(*map(astuple, parts), strict=True)))

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, Any]) -> Self:
        """Return the sums of a step from its metrics; of no tokens if nothing was measured."""
        tokens = metrics.get("logprob_rounding_tokens") or 0
        if tokens == 0:
            return cls()
        names = ("logprob_rounding_mean", "logprob_rounding_rms", "logprob_shift_mean")
        mean, rms, shift = (metrics[name] for name in names)
        return cls(tokens, tokens * mean, tokens * rms**2, tokens * shift)

    @property
    def mean(self) -> float:
        """Return the mean of |t - f|."""
        return self.rounding / self.tokens

    @property
    def shift_mean(self) -> float:
        """Return the mean of e - t; above 0 where the engine gives its tokens too much probability."""
        return self.shift / self.tokens if self.tokens else 0.0

    @property
    def explained(self) -> float:
        """Return the mean of |e - t| that rounding explains, without a bound; 0 if too little is known."""
        return _GAP_RATIO * self.mean if self.is_known else 0.0

    @property
    def is_known(self) -> bool:
        """Return True if these are enough tokens for a limit."""
        return self.tokens >= _MIN_TOKENS

    def gap_limit(self, num_tokens: float) -> float:
        """Return how large the mean of |e - t| over `num_tokens`, these or similar ones, is by rounding alone."""
        if not self.is_known:
            return LARGEST
        error = self._deviation * math.sqrt(1 / self.tokens + 1 / num_tokens)
        return _bounded(_GAP_RATIO * (self.mean + _NUM_DEVIATIONS * error))

    def shift_limit(self) -> float:
        """Return how large |mean (e - t)| over these tokens is by rounding alone."""
        if not self.is_known:
            return LARGEST
        error = _GAP_RATIO * self._deviation / math.sqrt(self.tokens)
        return _bounded(_SHIFT_RATIO * self.mean + _NUM_DEVIATIONS * error)

    @property
    def _deviation(self) -> float:
        """Return the standard deviation of |t - f| from token to token."""
        return math.sqrt(max(0.0, self.squares / self.tokens - self.mean**2))


def _bounded(limit: float) -> float:
    return min(max(limit, _SMALLEST), LARGEST)
