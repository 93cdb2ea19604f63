"""Is the engine's policy the trainer's? Log-probabilities of both flow in, a diagnosis flows out when they are apart.

A probe, some tokens of the training data, is scored by the trainers with the weights of a sync and by each engine that
has committed them; the sampled tokens of a step are a second look, through temperature and sampling. In float32 both
agree to rounding; in bfloat16 rounding is what is measured at the start, so that twice as much is a change.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from coati_rl.config.sync import OnLogprobGap

Precision = Literal["fp32", "bf16"]

FLOAT32_LIMIT = 1e-4  # nats; vLLM against transformers: 6e-5 at most
_GROWTH_LIMIT = 2.0  # times the gap at the start, in bfloat16
_NUM_REMEMBERED = 4  # versions whose expectations are kept, to recognise an engine that has stayed behind
_BFLOAT16_SIZE = (1e-3, 0.3)  # nats: what rounding to bfloat16 looks like, mean over tokens
_STALE_SHARE = 0.1  # of the gap, below which an older version explains it


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """|engine - trainer| in nats over a probe's tokens."""

    mean: float
    max: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GapSettings:
    """What is too much, and what happens then."""

    precision: Precision = "fp32"
    limit: float | None = None  # nats; None: 1e-4 in fp32, twice the gap at the start in bf16
    judges_sampled: bool = True  # False where the sampled tokens' gap is known to be large, or corrected for
    on_gap: OnLogprobGap = "stop"


class GapGate:
    """Keeps what is expected, and judges what was measured."""

    def __init__(self, settings: GapSettings) -> None:
        self._precision = settings.precision
        self._limit = settings.limit
        self._judges_sampled = settings.judges_sampled
        self._stops = settings.on_gap == "stop"
        self.problem: str | None = None  # for which the run has to stop
        self._message: str | None = None
        self.is_corrected = False  # the loss corrects for the gap, from the next step on
        self._expected: deque[tuple[int, np.ndarray]] = deque(maxlen=_NUM_REMEMBERED)
        self._start: dict[str, float] = {}  # what was measured first, by kind
        self._start_version: int | None = None
        self._last_probe: Gap | None = None

    def expect(self, version: int, logprobs: np.ndarray) -> None:
        """The trainers' float32[T - 1] of the probe under `version`."""
        if self._start_version is None:
            self._start_version = version
        if not self._expected or self._expected[-1][0] != version:
            self._expected.append((version, logprobs))

    def measure(self, version: int, logprobs: np.ndarray) -> Gap | None:
        """An engine's float32[T - 1] against what is expected; None if the engine gives none, or none is expected."""
        expected = dict(self._expected).get(version)
        if expected is None or len(logprobs) == 0:
            return None
        apart = np.abs(logprobs.astype(np.float64) - expected)
        gap = Gap(mean=float(apart.mean()), max=float(apart.max()))
        if version == self._start_version:
            self._start["probe"] = max(self._start.get("probe", 0.0), gap.mean)
        self._last_probe = gap
        return gap

    def probe_problem(self, version: int, logprobs: np.ndarray, gap: Gap) -> str | None:
        """Why an engine's answers to the probe are not those of these weights; None if they are."""
        size = gap.max if self._precision == "fp32" and self._limit is None else gap.mean
        limit = self._limit_of("probe")
        if limit is None or size <= limit:
            return None
        return (
            f"the engine's log-probabilities of the probe under version {version} are {gap.mean:.2g} nats (mean) and "
            f"{gap.max:.2g} (largest) from the trainer's, past {limit:.2g}: {self._diagnosis(version, logprobs, gap)}"
        )

    def sampled_problem(self, step: int, gap: float | None) -> str | None:
        """Why the log-probabilities of a step's sampled tokens (mean gap, nats) cannot be trusted; None if they can."""
        if gap is None or self._last_probe is None or self.is_corrected or not self._judges_sampled:
            return None
        self._start.setdefault("sampled", gap)
        limit = self._limit_of("sampled")
        if limit is None or gap <= limit:
            return None
        return (
            f"in step {step} engine and trainer are {gap:.2g} nats apart (mean over tokens sampled with the trainer's "
            f"own weights), past {limit:.2g}, while the probe agrees to {self._last_probe.mean:.2g}: the weights are "
            "right and both sides see the same token ids; the engine samples at another temperature, or from a changed "
            "distribution (top-k, top-p, penalties of its generation config)"
        )

    def judge(self, problem: str | None) -> None:
        """Act on a problem, the first one only."""
        if problem is None or self.problem is not None or self.is_corrected:
            return
        if self._stops:
            self.problem = problem
            return
        self.is_corrected = True
        self._message = f"{problem}; the loss corrects for it from the next step on"

    def take_message(self) -> str | None:
        """What was decided, once, for people."""
        message, self._message = self._message, None
        return message

    def _limit_of(self, kind: str) -> float | None:
        if self._limit is not None:
            return self._limit
        if self._precision == "fp32":
            return FLOAT32_LIMIT
        start = self._start.get(kind)
        return None if start is None else _GROWTH_LIMIT * start

    def _diagnosis(self, version: int, logprobs: np.ndarray, gap: Gap) -> str:
        for older, expected in self._expected:
            distance = float(np.abs(logprobs.astype(np.float64) - expected).mean())
            if older != version and distance < _STALE_SHARE * gap.mean:
                return (
                    f"they are those of version {older} ({distance:.2g} nats): stale weights, or a stale prefix cache"
                )
        low, high = _BFLOAT16_SIZE
        if self._precision == "fp32" and low <= gap.mean <= high:
            return "of the size of bfloat16's rounding: check that trainer and engine compute in float32"
        return (
            "no older version explains them, and both sides see the same token ids, so it is not the chat template: "
            "engine and trainer compute different models (dtype, rope scaling, a layer that was not loaded)"
        )
