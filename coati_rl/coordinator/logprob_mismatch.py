"""Check the trainer/engine log-probability mismatch, and diagnose a mismatch that is too large.

A probe, some tokens of the training data, is scored by the trainers with the weights of a sync and by each engine that
has committed them; the sampled tokens of a step are a second check, which includes temperature and sampling. In float32
both agree to rounding; in bfloat16 the trainers score the same tokens in float32, too, and `RoundingSums` bounds what
rounding explains.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from coati_rl.algorithms.rounding import LARGEST, RoundingSums
from coati_rl.config.sync import SyncConfig

Precision = Literal["fp32", "bf16"]

FLOAT32_LIMIT = 1e-4  # nats; vLLM against transformers: 6e-5 at most
_NUM_EXPECTED = 4  # policy versions whose expected values are kept, to recognise an engine with stale weights
_BFLOAT16_SIZE = (1e-3, LARGEST)  # nats: range of bfloat16 rounding, mean over tokens
MIN_SAMPLED_TOKENS = 256  # whose rounding is known, before sampled tokens are judged in bfloat16
_NUM_MEASURED = 8  # steps over which rounding and shift of sampled tokens are averaged; they change as weights move
_FLOAT32_REMEDY = "use --precision fp32, or --max-logprob-gap to accept it"
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

    KEPT: ClassVar = ("problem", "is_corrected", "_expected", "_rounding", "_sampled", "_last_probe")

    def __init__(self, settings: MismatchSettings, sync: SyncConfig) -> None:
        self._precision = settings.precision
        self._limit = sync.max_logprob_gap  # nats; None: 1e-4 in fp32, what rounding explains in bf16
        self._judges_sampled = settings.judges_sampled
        self._magnification = 1 / min(1.0, settings.temperature)
        self._stops = sync.on_logprob_gap == "stop"
        self.problem: str | None = None  # for which the run has to stop
        self.is_corrected = False  # True: the loss corrects for the mismatch
        self._expected: deque[tuple[int, np.ndarray]] = deque(maxlen=_NUM_EXPECTED)
        self._rounding: np.ndarray | None = None  # of the probe, float32 minus bfloat16, measured last
        self._sampled: deque[RoundingSums] = deque(maxlen=_NUM_MEASURED)
        self._last_probe: LogprobMismatch | None = None

    def expect(self, version: int, logprobs: np.ndarray, reference: np.ndarray | None = None) -> None:
        """Set the trainers' log-probabilities float32[T - 1] of the probe under policy version `version`.

        Args:
            version: of the weights.
            logprobs: in the run's precision.
            reference: in float32; None: not measured this time, or no limit depends on it.
        """
        if self._expected and self._expected[-1][0] == version:
            self._expected.pop()  # scored again: in another attempt of a sync, or with another engine's routes
        self._expected.append((version, logprobs))
        self._rounding = self._rounding if reference is None else reference - logprobs

    def measure(self, version: int, logprobs: np.ndarray) -> LogprobMismatch | None:
        """Compare an engine's float32[T - 1] with the expected ones; None if either is missing."""
        expected = dict(self._expected).get(version)
        if expected is None or len(logprobs) == 0:
            return None
        if logprobs.shape != expected.shape:
            return LogprobMismatch(mean=math.inf, max=math.inf)
        apart = np.abs(logprobs.astype(np.float64) - expected)
        self._last_probe = LogprobMismatch(mean=float(apart.mean()), max=float(apart.max()))
        return self._last_probe

    def probe_problem(self, version: int, logprobs: np.ndarray, gap: LogprobMismatch) -> str | None:
        """Return why an engine's log-probabilities of the probe do not match its policy version; None if they do."""
        rounding = self._probe_rounding(version, logprobs)
        if rounding is None:
            size, limit = (gap.mean, self._limit) if self._limit is not None else (gap.max, FLOAT32_LIMIT)
        else:
            size, limit = gap.mean, rounding.gap_limit(rounding.tokens)
        is_shifted = rounding is not None and not abs(rounding.shift_mean) <= rounding.shift_limit()
        if size <= limit and not is_shifted:  # False for NaN
            return None
        return (
            f"the engine's log-probabilities of the probe under version {version} are {gap.mean:.2g} nats (mean) and "
            f"{gap.max:.2g} (largest) from the trainer's{_against(size, limit, rounding)}: "
            f"{self._diagnosis(version, logprobs, gap)}"
        )

    def sampled_problem(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Return why the log-probabilities of a step's sampled tokens do not match; None if they do, or are too few.

        Args:
            step: from 1.
            metrics: the trainers', with logprob_gap_mean, logprob_gap_tokens, the number of tokens in the mean, and in
                bfloat16 those of `RoundingSums.from_metrics`.
        """
        if (measured := RoundingSums.from_metrics(metrics)).tokens:
            self._sampled.append(measured)
        gap, num_tokens = metrics.get("logprob_gap_mean"), metrics.get("logprob_gap_tokens", 0)
        if gap is None or self._last_probe is None or not self._judges_sampled:
            return None
        rounding = None
        limit = FLOAT32_LIMIT * self._magnification if self._limit is None else self._limit
        if self._precision == "bf16" and self._limit is None:
            rounding = RoundingSums.total(self._sampled)
            if rounding.tokens < MIN_SAMPLED_TOKENS:
                return None
            limit = rounding.gap_limit(num_tokens)
        is_shifted = rounding is not None and not abs(rounding.shift_mean) <= rounding.shift_limit()
        if gap <= limit and not is_shifted:
            return None
        return (
            f"in step {step} the log-probabilities of engine and trainer differ by {gap:.2g} nats (mean over tokens, "
            f"with the weights that sampled each){_against(gap, limit, rounding)}, while the probe agrees to "
            f"{self._last_probe.mean:.2g}: {self._sampled_diagnosis(gap, rounding)}"
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

    def _probe_rounding(self, version: int, logprobs: np.ndarray) -> RoundingSums | None:
        """Return the sums of the probe under a version, None where the limit does not depend on them."""
        if self._precision == "fp32" or self._limit is not None:
            return None
        expected = dict(self._expected)[version]
        if self._rounding is None or logprobs.shape != expected.shape:
            return RoundingSums()
        return RoundingSums.of(logprobs, expected, expected + self._rounding)

    def _sampled_diagnosis(self, gap: float, rounding: RoundingSums | None) -> str:
        if rounding is not None and gap <= rounding.explained:
            return f"bfloat16 explains it; {_FLOAT32_REMEDY}"
        cause = "engine and trainer differ on the same weights"
        if len(self._expected) > 1:
            moved = float(np.abs(self._expected[-1][1].astype(np.float64) - self._expected[-2][1]).mean())
            if gap <= 2 * moved:
                cause = (
                    f"the weights may have moved between (the last sync moved the probe by {moved:.2g}) if tokens were "
                    "sampled before the version that they carry; or " + cause
                )
            else:
                cause += f" (the last sync moved the probe by {moved:.2g} only)"
        return (
            f"{cause}. Both have the same token ids; the engine samples at another temperature, or from a changed "
            "distribution (top-k, top-p, penalties of its generation config), or the trainer computes samples that "
            "share a row differently from the probe, which is alone in its row"
        )

    def _diagnosis(self, version: int, logprobs: np.ndarray, gap: LogprobMismatch) -> str:
        if not math.isfinite(gap.mean):
            return f"it returned {len(logprobs)} numbers, or numbers that are not finite"
        rounding = self._probe_rounding(version, logprobs)
        if rounding is not None and gap.mean <= rounding.explained:
            return f"bfloat16 explains it; {_FLOAT32_REMEDY}"
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


def _against(gap: float, limit: float, rounding: RoundingSums | None) -> str:
    """Say which limit was exceeded, and what was measured of rounding."""
    text = f", above the limit {limit:.2g}" if not gap <= limit else ""
    if rounding is None or not rounding.is_known:
        return text
    text += (
        f" (the trainer's own rounding: {rounding.mean:.2g}, bfloat16 against float32 on {rounding.tokens:.0f} tokens)"
    )
    shift = rounding.shift_mean
    if abs(shift) <= rounding.shift_limit():
        return text
    return f"{text}, and are shifted by {shift:+.2g}, where rounding explains {rounding.shift_limit():.2g}"
