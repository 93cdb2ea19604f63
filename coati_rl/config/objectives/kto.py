"""Set the loss of completions that are labelled desirable or undesirable."""

from typing import Self

from pydantic import model_validator

from coati_rl.config.fields import Section, experiment


class KtoConfig(Section):
    """Loss of labelled completions (KTO)."""

    beta: float = experiment(0.1, "Scale of log-ratios, against the KL to the reference.", gt=0)
    desirable_weight: float = experiment(1.0, "Weight of desirable completions.", ge=0)
    undesirable_weight: float = experiment(
        1.0, "Weight of undesirable completions; more of one kind are balanced by a weight below 1.", ge=0
    )

    @model_validator(mode="after")
    def _something_is_weighed(self) -> Self:
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError("--desirable-weight 0 and --undesirable-weight 0 train nothing; raise one of them")
        return self
