"""Name the choices of each part of an algorithm, without importing torch, which takes seconds."""

from typing import Literal

KLEstimator = Literal["k1", "k2", "k3"]
RatioLevel = Literal["token", "sequence"]
Correction = Literal["none", "tis", "icepop", "sequence_tis", "sequence_mask", "sequence_mask_tis"]
OF_SEQUENCES: tuple[Correction, ...] = ("sequence_tis", "sequence_mask", "sequence_mask_tis")
POLICY_LOSSES = ("clip", "cispo", "sapo", "gmpo", "vespo")
LOSSES_OF_SEQUENCES = ("gmpo", "vespo")  # these form a ratio of the whole sample by themselves
TokenSelection = Literal["all", "top_entropy", "clip_cov", "kl_cov"]
TOKEN_FRACTIONS: dict[str, float] = {"top_entropy": 0.2, "clip_cov": 2e-4, "kl_cov": 2e-4}
PreferenceLoss = Literal["dpo", "ipo", "robust", "simpo", "orpo"]
WITH_LABEL_SMOOTHING: tuple[PreferenceLoss, ...] = ("dpo", "robust", "simpo")
WITH_REFERENCE: tuple[PreferenceLoss, ...] = ("dpo", "ipo", "robust")  # the other losses compare with no reference

# Default bounds of pi_old / pi_engine.
CORRECTION_BOUNDS: dict[str, dict[str, float]] = {
    "tis": {"off_policy_low": 0.0, "off_policy_high": 2.0},  # one-sided
    "icepop": {"off_policy_low": 0.5, "off_policy_high": 5.0},
    "sequence_tis": {"off_policy_low": 0.0, "off_policy_high": 2.0},
    "sequence_mask": {"off_policy_low": 0.5, "off_policy_high": 2.0},
    "sequence_mask_tis": {"off_policy_low": 0.5, "off_policy_high": 5.0},
}
