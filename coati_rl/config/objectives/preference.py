"""Set the loss of preference pairs: DPO and related losses."""

from typing import Self

from pydantic import model_validator

from coati_rl.algorithms.choices import WITH_LABEL_SMOOTHING, PreferenceLoss
from coati_rl.config.fields import Section, experiment


class PreferenceConfig(Section):
    """Loss of pairs of a chosen and a rejected completion."""

    loss: PreferenceLoss = experiment(
        "dpo",
        "dpo (with --label-smoothing: cDPO), ipo, robust (DPO for noisy labels), simpo, orpo; the last two need no "
        "reference model.",
    )
    beta: float | None = experiment(
        None, "Scale of log-ratios, against the KL to the reference; default: 0.1, of simpo 2.", gt=0
    )
    label_smoothing: float = experiment(
        0.0, "Assumed share of pairs whose label is wrong (dpo, robust, simpo).", ge=0, lt=0.5
    )
    simpo_gamma: float | None = experiment(None, "Reward margin that simpo aims at; default: 0.5.", ge=0)
    orpo_lambda: float | None = experiment(
        None, "Weight of orpo's odds ratio beside the chosen completion's likelihood; default: 0.1.", ge=0
    )
    nll_coeff: float = experiment(
        0.0, "Weight of the chosen completion's negative log-likelihood per token, added to the loss (RPO).", ge=0
    )

    @model_validator(mode="after")
    def _loss_reads_what_is_given(self) -> Self:
        """Refuse a setting that the loss does not read."""
        loss = self.loss
        if loss == "orpo" and self.beta is not None:
            raise ValueError(f"--beta {self.beta:g} with --loss orpo: its weight is --orpo-lambda; use that")
        if loss == "orpo" and self.nll_coeff:
            raise ValueError(f"--nll-coeff {self.nll_coeff:g} with --loss orpo: orpo has this term; leave it out")
        if loss != "simpo" and self.simpo_gamma is not None:
            raise ValueError(f"--simpo-gamma {self.simpo_gamma:g} with --loss {loss}: only simpo has it; leave it out")
        if loss != "orpo" and self.orpo_lambda is not None:
            raise ValueError(f"--orpo-lambda {self.orpo_lambda:g} with --loss {loss}: only orpo has it; leave it out")
        if self.label_smoothing and loss not in WITH_LABEL_SMOOTHING:
            known = ", ".join(WITH_LABEL_SMOOTHING)
            raise ValueError(f"--label-smoothing {self.label_smoothing:g} with --loss {loss}: only for {known}")
        if loss == "robust" and not self.label_smoothing:
            raise ValueError("--loss robust needs --label-smoothing above 0, the share of wrong labels; or --loss dpo")
        return self
