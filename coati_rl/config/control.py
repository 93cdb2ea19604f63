"""Set what follows the policy during a run: the weight of KL, the weight of the entropy bonus, the reference model."""

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import field_validator

from coati_rl.config.fields import Section, experiment

KLController = Literal["fixed", "adaptive"]


@dataclass(frozen=True, slots=True)
class ReferenceUpdate:
    """After every `interval` optimizer steps the reference moves to (1 - mix) * reference + mix * policy."""

    interval: int
    mix: float  # above 0; 1: the policy replaces it

    @classmethod
    def parse(cls, text: str) -> "ReferenceUpdate":
        """Read every=N, every=N,mix=M or ema=A. Raises: ValueError."""
        every = re.fullmatch(r"every=(\d+)(?:,mix=([0-9.e-]+))?", text)
        average = re.fullmatch(r"ema=([0-9.e-]+)", text)
        if every:
            interval, mix = int(every[1]), float(every[2] or 1.0)
        elif average:
            interval, mix = 1, 1 - float(average[1])
        else:
            raise ValueError("write every=N, every=N,mix=M or ema=A, like every=200 or ema=0.99")
        if interval < 1 or not 0 < mix <= 1:
            raise ValueError("every must be at least 1, mix above 0 and at most 1, ema below 1 and not negative")
        return cls(interval, mix)


class ControlConfig(Section):
    """Weights and models that follow the policy during a run."""

    kl_controller: KLController = experiment(
        "fixed",
        "Weight of KL: -kl, or adapted after each step so that KL stays near --kl-target.",
        needs={"kl_coeff": ()},
    )
    kl_target: float = experiment(
        0.1, "KL that the adaptive weight holds, nats per token.", gt=0, needs={"kl_controller": ("adaptive",)}
    )
    kl_horizon: float = experiment(
        10_000.0,
        "Samples over which the adaptive weight changes by at most a fifth of itself.",
        gt=0,
        needs={"kl_controller": ("adaptive",)},
    )
    entropy_target: float | None = experiment(
        None,
        "Adapt the weight of the entropy bonus: it grows after each step with less entropy, nats per token, shrinks "
        "after others, and counts after steps at or below. Begins with --entropy-coeff. None: fixed.",
        gt=0,
    )
    entropy_coeff_delta: float = experiment(
        0.005, "By how much that weight changes.", gt=0, needs={"entropy_target": ()}
    )
    entropy_coeff_max: float = experiment(1.0, "Largest weight that it reaches.", gt=0, needs={"entropy_target": ()})
    reference_update: str | None = experiment(
        None,
        "Move the reference of KL: every=N replaces it by the policy after N optimizer steps each, every=N,mix=M by "
        "(1 - M) * reference + M * policy, ema=A after each step by A * reference + (1 - A) * policy. None: it stays.",
        metavar="every=N|ema=A",
        needs={"kl_coeff": ()},
    )

    @field_validator("reference_update")
    @classmethod
    def _check_update(cls, text: str | None) -> str | None:
        if text is not None:
            ReferenceUpdate.parse(text)
        return text

    @property
    def reference_moves(self) -> ReferenceUpdate | None:
        """Return how the reference follows the policy; None: it does not."""
        return None if self.reference_update is None else ReferenceUpdate.parse(self.reference_update)
