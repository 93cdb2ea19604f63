"""Set the reference model that a loss compares with, and when it is evaluated."""

from coati_rl.config.fields import Section, execution, experiment


class ReferenceConfig(Section):
    """Reference model of a preference loss."""

    reference_model: str | None = experiment(
        None, "Model directory in HF format that the loss compares with; default: --model as it is at the start."
    )
    precompute_reference: bool = execution(
        False,
        "Compute the reference's log-probabilities once, before the first step, and keep them in the run directory; "
        "the reference model is then freed.",
    )
