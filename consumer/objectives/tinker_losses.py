"""Compute the losses of Tinker's API: exact sums over all positions, without mask, mean or temperature.

With l the log-probability of a target under the trained weights, q the one that the caller sent, A its advantage and
r = exp(l - q). A clip threshold is a bound of the ratio itself, not a distance from 1. Source: Tinker's documentation
of its losses; it publishes no defaults for gspo and dro, and those here are ppo's and that of its example. M targets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coati_rl.tinker.core import RequestError

REMEDY = "use cross_entropy, importance_sampling, ppo, cispo, dro or gspo"
_SAMPLED = ("logprobs", "advantages")
INPUTS: Mapping[str, tuple[str, ...]] = {  # beside target_tokens
    "cross_entropy": ("weights",),
    "importance_sampling": _SAMPLED,
    "ppo": _SAMPLED,
    "cispo": _SAMPLED,
    "dro": _SAMPLED,
    "gspo": (*_SAMPLED, "sequence_ratio_mask"),
}
OPTIONAL: Mapping[str, float] = {"weights": 1.0}  # inputs that may be absent, and what they are then
_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
SETTINGS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _BOUNDS,
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": _BOUNDS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerLoss:
    """Name a loss and its settings."""

    name: str
    settings: Mapping[str, float] = field(default_factory=dict)  # all of the loss

    @property
    def is_token_separable(self) -> bool:
        """Return True if a target's term depends on that target's arrays alone."""
        return self.name != "gspo"


def tinker_loss(name: str, settings: Mapping[str, float | str]) -> TinkerLoss:
    """Return a checked loss, with its defaults filled in.

    Raises: RequestError for an unknown name, or a setting that the loss does not have or that is not a finite number.
    """
    if name == "stable_reinforce":
        raise RequestError("loss_fn='stable_reinforce': no formula is published; use loss_fn=importance_sampling")
    if name not in INPUTS:
        raise RequestError(f"loss_fn={name!r} is unknown; {REMEDY}")
    found = dict(SETTINGS[name])
    for key, value in settings.items():
        if key not in found:
            known = ", ".join(found) or "no setting"
            raise RequestError(f"loss_fn_config[{key!r}]: {name} has {known}; leave it out")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RequestError(f"loss_fn_config[{key!r}]={value!r}: use a finite number")
        found[key] = float(value)
    low, high = found.get("clip_low_threshold", 0.0), found.get("clip_high_threshold", 1.0)
    if low > high:
        raise RequestError(
            f"loss_fn_config['clip_low_threshold']={low:g} is above clip_high_threshold={high:g}: both are bounds of "
            "the ratio, such as 0.8 and 1.2"
        )
    return TinkerLoss(name=name, settings=found)


def loss_terms(loss: TinkerLoss, logprobs: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
    """Return the terms whose sum is the loss, float32[M].

    cross_entropy: -w l. importance_sampling: -r A. ppo: -min(r A, clip(r) A). cispo: -sg(clip(r)) l A.
    dro: -(l A - beta / 2 (l - q)^2). gspo: as ppo, with r = exp(mean of l - q over the sequence's mask), whose value is
    the sequence's and whose gradient is each token's own.

    Args:
        loss: name and settings.
        logprobs: float32[M] in nats; carries the gradient.
        arrays: float32[M] each, see `INPUTS`; for gspo also `sequence_log_ratio`, of `sequence_log_ratios`.
    """
    if loss.name == "cross_entropy":
        return -(logprobs * arrays["weights"])
    advantages, log_ratio = arrays["advantages"], logprobs - arrays["logprobs"]
    if loss.name == "dro":
        return -(logprobs * advantages - 0.5 * loss.settings["beta"] * log_ratio.square())
    if loss.name == "gspo":
        log_ratio = arrays["sequence_log_ratio"] + (logprobs - logprobs.detach())
    ratio = log_ratio.exp()
    if loss.name == "importance_sampling":
        return -(ratio * advantages)
    clipped = ratio.clamp(loss.settings["clip_low_threshold"], loss.settings["clip_high_threshold"])
    if loss.name == "cispo":
        return -(clipped.detach() * logprobs * advantages)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def sequence_log_ratios(logprobs: Tensor, arrays: Mapping[str, Tensor], counts: Sequence[int]) -> Tensor:
    """Return each target's mean of l - q over its sequence's mask, float32[M] without gradient; 0 without a mask.

    Args:
        logprobs: float32[M].
        arrays: `logprobs` and `sequence_ratio_mask`, float32[M]; a target counts where the mask is not 0.
        counts: targets of each sequence, in order; they add up to M.
    """
    means = []
    for own, sent, mask in zip(
        logprobs.detach().split([*counts]),
        arrays["logprobs"].split([*counts]),
        arrays["sequence_ratio_mask"].split([*counts]),
        strict=True,
    ):
        is_counted = mask != 0
        mean = (own - sent).where(is_counted, 0.0).sum() / is_counted.sum().clamp(min=1)
        means.append(mean.expand(len(own)))
    return torch.cat(means)
