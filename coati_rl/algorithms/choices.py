"""Name the choices of each part of an algorithm, without importing torch, which takes seconds."""

from typing import Literal

KLEstimator = Literal["k1", "k2", "k3"]
RatioLevel = Literal["token", "sequence"]
Correction = Literal["none", "tis", "icepop", "sequence_mask", "sequence_mask_tis"]
OF_SEQUENCES: tuple[Correction, ...] = ("sequence_mask", "sequence_mask_tis")  # these need whole samples
POLICY_LOSSES = ("clip", "cispo", "sapo")
PreferenceLoss = Literal["dpo", "ipo", "robust", "simpo", "orpo"]
WITH_LABEL_SMOOTHING: tuple[PreferenceLoss, ...] = ("dpo", "robust", "simpo")
WITH_REFERENCE: tuple[PreferenceLoss, ...] = ("dpo", "ipo", "robust")  # the other losses compare with no reference

# Default bounds of pi_old / pi_engine.
CORRECTION_BOUNDS: dict[str, dict[str, float]] = {
    "tis": {"off_policy_low": 0.0, "off_policy_high": 2.0},  # one-sided
    "icepop": {"off_policy_low": 0.5, "off_policy_high": 5.0},
    "sequence_mask": {"off_policy_low": 0.5, "off_policy_high": 2.0},
    "sequence_mask_tis": {"off_policy_low": 0.5, "off_policy_high": 5.0},
}
