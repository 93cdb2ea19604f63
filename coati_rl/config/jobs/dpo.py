"""Define training on preferences."""

from typing import ClassVar, Self

from pydantic import model_validator

from coati_rl.algorithms.choices import WITH_LABEL_SMOOTHING, WITH_REFERENCE, PreferenceLoss
from coati_rl.config.fields import Section, experiment
from coati_rl.config.jobs.common import WithReference, project
from coati_rl.config.offline_data import PairDataConfig
from coati_rl.config.training import TrainingRunConfig


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


class DpoRunConfig(TrainingRunConfig):
    """Seed, outputs, intervals."""

    project: str = project("DPO")


class DpoJobConfig(WithReference):
    """The settings of training on preferences."""

    COMMAND: ClassVar[str] = "coati-rl dpo"
    SUMMARY: ClassVar[str] = "Train on pairs of a chosen and a rejected completion: DPO, IPO, SimPO, ORPO and others."
    JOB: ClassVar[str] = "dpo"
    SAMPLES: ClassVar[str] = "coati_rl.reading.offline_samples:pair_samples"
    OBJECTIVE: ClassVar[str] = "consumer.objectives.preference:of_job"

    data: PairDataConfig = PairDataConfig()
    objective: PreferenceConfig = PreferenceConfig()
    run: DpoRunConfig = DpoRunConfig()

    @property
    def uses_reference(self) -> bool:
        """True if the loss compares with a reference model."""
        return self.objective.loss in WITH_REFERENCE

    @property
    def objective_text(self) -> str:
        """Return the objective for people, as the plan shows it."""
        return f"{self.objective.loss} of pairs"
