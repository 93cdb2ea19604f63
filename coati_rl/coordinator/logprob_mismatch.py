"""Check the trainer/engine log-probability mismatch, and diagnose a mismatch that is too large.

A probe, some tokens of the training data, is scored by the trainers with the weights of a sync and by each engine that
has committed them; the sampled tokens of a step are a second check, which includes temperature and sampling. In float32
both agree to rounding; in bfloat16 the rounding is measured at the start, and twice as much counts as a mismatch.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from coati_rl.config.sync import SyncConfig

Precision = Literal["fp32", "bf16"]

FLOAT32_LIMIT = 1e-4  # nats; vLLM against transformers: 6e-5 at most
_GROWTH_LIMIT = 2.0  # times the mismatch at the start, in bfloat16
_NUM_EXPECTED = 4  # policy versions whose expected values are kept, to recognise an engine with stale weights
_BFLOAT16_SIZE = (1e-3, 0.3)  # nats: range of bfloat16 rounding, mean over tokens
_BFLOAT16_FLOOR = 1e-3  # nats: least limit in bfloat16, whatever was measured at the start
MIN_SAMPLED_TOKENS = 256  # of a step in bfloat16, so that noise does not dominate the mean
_STALE_FRACTION = 0.1  # of the mismatch; an older version that is closer than this explains it


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobMismatch:
    """Hold |engine - trainer| in nats over a probe's tokens."""

    mean: float
    max: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchSettings:
    """Hold what is known of a run's mismatch; `SyncConfig` has its limit, and the action when it is exceeded."""

    precision: Precision = "fp32"
    judges_sampled: bool = True  # False where the mismatch of sampled tokens is known to be large, or corrected for
    temperature: float = 1.0  # of sampling: below 1 it magnifies the mismatch of sampled tokens


class LogprobMismatchMonitor:
    """Keep the expected log-probabilities, and compare measured ones with them."""

    def __init__(self, settings: MismatchSettings, sync: SyncConfig) -> None:
        self._precision = settings.precision
        self._limit = sync.max_logprob_gap  # nats; None: 1e-4 in fp32, twice the mismatch at the start in bf16
        self._judges_sampled = settings.judges_sampled
        self._magnification = 1 / min(1.0, settings.temperature)
        self._stops = sync.on_logprob_gap == "stop"
        self.problem: str | None = None  # for which the run has to stop
        self.is_corrected = False  # True: the loss corrects for the mismatch
        self._expected: deque[tuple[int, np.ndarray]] = deque(maxlen=_NUM_EXPECTED)
        self._start: dict[str, float] = {}  # first measurement, by kind
        self._start_version: int | None = None
        self._last_probe: LogprobMismatch | None = None

    def expect(self, version: int, logprobs: np.ndarray) -> None:
        """Set the trainers' log-probabilities float32[T - 1] of the probe under policy version `version`."""
        if self._start_version is None:
            self._start_version = version
        if not self._expected or self._expected[-1][0] != version:
            self._expected.append((version, logprobs))

    def measure(self, version: int, logprobs: np.ndarray) -> LogprobMismatch | None:
        """Compare an engine's float32[T - 1] with the expected ones; None if either is missing."""
        expected = dict(self._expected).get(version)
        if expected is None or len(logprobs) == 0:
            return None
        if logprobs.shape != expected.shape:
            return LogprobMismatch(mean=math.inf, max=math.inf)
        apart = np.abs(logprobs.astype(np.float64) - expected)
        gap = LogprobMismatch(mean=float(apart.mean()), max=float(apart.max()))
        # A larger difference than rounding does not measure rounding.
        if version == self._start_version and gap.mean <= _BFLOAT16_SIZE[1]:
            self._start["probe"] = max(self._start.get("probe", 0.0), gap.mean)
        self._last_probe = gap
        return gap

    def probe_problem(self, version: int, logprobs: np.ndarray, gap: LogprobMismatch) -> str | None:
        """Return why an engine's log-probabilities of the probe do not match its policy version; None if they do."""
        size = gap.max if self._precision == "fp32" and self._limit is None else gap.mean
        limit = self._limit_of("probe")
        if size <= limit:  # False for NaN
            return None
        return (
            f"the engine's log-probabilities of the probe under version {version} are {gap.mean:.2g} nats (mean) and "
            f"{gap.max:.2g} (largest) from the trainer's, above the limit {limit:.2g}: "
            f"{self._diagnosis(version, logprobs, gap)}"
        )

    def sampled_problem(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Return why the log-probabilities of a step's sampled tokens do not match; None if they do, or are too few.

        Args:
            step: from 1.
            metrics: the trainers', with logprob_gap_mean, and logprob_gap_tokens, the number of tokens in the mean.
        """
        gap, num_tokens = metrics.get("logprob_gap_mean"), metrics.get("logprob_gap_tokens", 0)
        if gap is None or self._last_probe is None or not self._judges_sampled:
            return None
        if self._precision == "bf16" and num_tokens < MIN_SAMPLED_TOKENS:
            return None
        self._start.setdefault("sampled", gap)
        limit = self._limit_of("sampled")
        if gap <= limit:
            return None
        return (
            f"in step {step} the log-probabilities of engine and trainer differ by {gap:.2g} nats (mean over tokens, "
            f"with the weights that sampled each), above the limit {limit:.2g}, while the probe agrees to "
            f"{self._last_probe.mean:.2g}: the weights are right and both sides have the same token ids; the engine "
            "samples at another temperature, or from a changed distribution (top-k, top-p, penalties of its generation "
            "config)"
        )

    def judge(self, problem: str | None) -> str | None:
        """Handle the first problem only. Returns: a warning, if the run continues."""
        if problem is None or self.problem is not None or self.is_corrected:
            return None
        if self._stops:
            self.problem = problem
            return None
        self.is_corrected = True
        return f"{problem}; the loss corrects for it from the next rollout step on"

    def _limit_of(self, kind: str) -> float:
        if self._limit is not None:
            return self._limit
        if self._precision == "fp32":
            return FLOAT32_LIMIT * (self._magnification if kind == "sampled" else 1.0)
        start = self._start.get(kind)
        return _BFLOAT16_SIZE[1] if start is None else max(_GROWTH_LIMIT * start, _BFLOAT16_FLOOR)

    def _diagnosis(self, version: int, logprobs: np.ndarray, gap: LogprobMismatch) -> str:
        if not math.isfinite(gap.mean):
            return f"it returned {len(logprobs)} numbers, or numbers that are not finite"
        for older, expected in self._expected:
            distance = float(np.abs(logprobs.astype(np.float64) - expected).mean())
            if older != version and distance < _STALE_FRACTION * gap.mean:
                return (
                    f"they are those of version {older} ({distance:.2g} nats): stale weights, or a stale prefix cache"
                )
        low, high = _BFLOAT16_SIZE
        if self._precision == "fp32" and low <= gap.mean <= high:
            return "of the size of bfloat16's rounding: check that trainer and engine compute in float32"
        return (
            "no older version explains them, and both sides have the same token ids, so it is not the chat template: "
            "engine and trainer compute different models (dtype, rope scaling, a layer that was not loaded)"
        )
