"""Optimise the forward KL to a teacher on a dataset's tokens, mixed with their cross-entropy: distillation.

The teacher's whole distribution is the target at each loss token. The text may be the teacher's own (sequence-level
distillation, arXiv:1606.07947) or any other (arXiv:1503.02531).
"""

from collections.abc import Callable, Mapping
from typing import Any

from coati_rl.config.jobs.sft import SftJobConfig
from coati_rl.ops.distilled_loss import DistilledLoss
from coati_rl.protocols import LossFn, Role
from consumer.objectives.cross_entropy import CrossEntropy
from consumer.objectives.objective import mean_of


def of_job(config: SftJobConfig, load_tokenizer: Callable[[], Any]) -> CrossEntropy:
    """Build the objective of supervised fine-tuning: cross-entropy, or the mixture if there is a teacher."""
    return CrossEntropy() if config.teacher is None else ForwardKL(kl_weight=config.distillation.distill_weight)


class ForwardKL(CrossEntropy):
    """Average (1 - kl_weight) * -log p(token) + kl_weight * KL(teacher || policy) over all loss tokens of the batch."""

    def __init__(self, *, kl_weight: float = 1.0) -> None:
        """Mix by `kl_weight`. Raises: ValueError if it is not above 0 and at most 1."""
        if not 0 < kl_weight <= 1:
            raise ValueError(f"kl_weight = {kl_weight} must be above 0 and at most 1")
        self._kl_weight = kl_weight

    @property
    def losses(self) -> Mapping[Role, LossFn]:
        """Return the mixture as the policy's loss."""
        weight = self._kl_weight
        return {"policy": DistilledLoss(loss=self, direction="forward", kl_coeff=weight, loss_coeff=1 - weight)}

    @property
    def hidden_states(self) -> Mapping[str, Role]:
        """Return the teacher."""
        return {"teacher_hidden": "teacher"}

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Return what cross-entropy reports, and the mean KL to the teacher.

        An evaluation computes log-probabilities alone: then loss and KL are None.
        """
        metrics = super().metrics(sums, loss_scale=loss_scale)
        if "teacher_kl_sum" not in sums:
            metrics["loss"] = None
        return {**metrics, "teacher_kl_mean": mean_of(sums, "teacher_kl_sum")}
