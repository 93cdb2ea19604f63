"""Adapt the weights of KL and entropy to what a run measures, from one optimizer step to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_KL_ERROR = 0.2  # of a step, relative to the target


@dataclass(frozen=True, kw_only=True, slots=True)
class KLControl:
    """Hold KL near a target: the weight is multiplied by 1 + clip(KL / target - 1, +-0.2) * min(1, samples / horizon).

    Source: arXiv:1909.08593 sec. 2.2, with K_beta = samples / horizon as in verl and OpenRLHF, but at most 1: from 5 on
    the factor could be 0 or negative.
    """

    target: float  # nats per token
    horizon: float  # samples

    def factor(self, kl: float, num_samples: float) -> float:
        """Return what the weight is multiplied by after a step. `kl`: mean over the step's tokens, nats."""
        error = min(max(kl / self.target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
        return 1 + error * min(1.0, num_samples / self.horizon)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyControl:
    """Hold entropy above a target: the weight grows by `delta` after a step at or below it, and shrinks after others.

    It counts only while the last step's entropy was at or below the target. Source: arXiv:2505.22312 (Skywork-OR1).
    """

    target: float  # nats per token
    delta: float
    largest: float

    def next(self, coeff: float, entropy: float) -> float:
        """Return the weight after a step with this mean entropy, nats."""
        return min(max(coeff + (self.delta if entropy <= self.target else -self.delta), 0.0), self.largest)


@dataclass(kw_only=True, slots=True)
class Coefficients:
    """Hold the weights that change during a run; all ranks with the LM head change them alike."""

    kl_scale: float = 1.0  # of the weight that the run began with
    entropy_coeff: float = 0.0
    last_entropy: float | None = None  # nats, of the last step; None: there was none
    kl_control: KLControl | None = field(default=None, repr=False)
    entropy_control: EntropyControl | None = field(default=None, repr=False)

    @property
    def applied_entropy_coeff(self) -> float:
        """Return the weight of the entropy bonus in the coming step."""
        control, last = self.entropy_control, self.last_entropy
        if control is not None and (last is None or last > control.target):
            return 0.0
        return self.entropy_coeff

    def end_step(self, *, kl: float | None, num_samples: float, entropy: float | None) -> None:
        """Adapt the weights to a step's means over tokens, in nats; None: the step had no tokens."""
        if self.kl_control is not None and kl is not None:
            self.kl_scale *= self.kl_control.factor(kl, num_samples)
        if self.entropy_control is not None and entropy is not None:
            self.entropy_coeff = self.entropy_control.next(self.entropy_coeff, entropy)
            self.last_entropy = entropy

    def state(self) -> dict[str, float | None]:
        """Return what a resume needs."""
        return {"kl_scale": self.kl_scale, "entropy_coeff": self.entropy_coeff, "last_entropy": self.last_entropy}

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Go on from a saved state with the weights that this run adapts, if the run that saved it did; see `state`."""
        if self.kl_control is not None:
            self.kl_scale = state.get("kl_scale") or self.kl_scale
        if self.entropy_control is not None and (last := state.get("last_entropy")) is not None:
            self.last_entropy, self.entropy_coeff = last, state.get("entropy_coeff") or 0.0
