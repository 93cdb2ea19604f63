"""Hold what several jobs on a dataset have: defaults of their own, and a reference model."""

from typing import Any, ClassVar

from coati_rl.config.fields import Section, execution, experiment
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.user_paths import OptionalPath

_RATE = OptimizerConfig.model_fields["learning_rate"].description or ""


def project(name: str) -> Any:
    """Return the field of a run's name with a default of the job's own."""
    return execution(name, "Name of the run; the default run directory is runs/<project>.", short="-p")


def learning_rate(value: float) -> Any:
    """Return the field of the learning rate with a default of the job's own."""
    return experiment(value, _RATE, short="-lr", gt=0)


class RewardOptimizerConfig(OptimizerConfig):
    """Learning rate, weight decay, clipping."""

    learning_rate: float = learning_rate(1e-5)


class ReferenceConfig(Section):
    """Reference model of a preference loss."""

    reference_model: OptionalPath = experiment(
        None, "Model directory in HF format that the loss compares with; default: --model as it is at the start."
    )
    precompute_reference: bool = execution(
        False,
        "Compute the reference's log-probabilities once, before the first step, and keep them in the run directory; "
        "the reference model is then freed.",
    )


class WithReference(OfflineConfig):
    """The settings of a job whose loss may compare with a reference model."""

    UNIT: ClassVar[int] = 2

    reference: ReferenceConfig = ReferenceConfig()
