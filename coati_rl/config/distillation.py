"""Set the teacher of a run, and how its distribution enters the loss."""

from typing import ClassVar, Literal

from coati_rl.config.fields import Needs, Section, experiment
from coati_rl.config.user_paths import OptionalPath

DistillKL = Literal["token", "full"]


class DistillationConfig(Section):
    """On-policy distillation: a frozen teacher scores what the policy samples."""

    NEEDS: ClassVar[Needs] = {"teacher": ()}

    teacher: OptionalPath = experiment(
        None,
        "Frozen model that the policy is distilled from: directory or hub id, with the policy's vocabulary; None: off.",
        metavar="MODEL",
    )
    distill_coeff: float = experiment(1.0, "Weight of the reverse KL to the teacher, beside advantages.", gt=0)
    distill_only: bool = experiment(False, "Learn from the teacher alone: rewards are only reported.")
    distill_kl: DistillKL = experiment(
        "token", "Reverse KL to the teacher: of the sampled token, as an advantage; or over the full vocabulary."
    )
