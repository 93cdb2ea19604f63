"""Set the optimizer: AdamW, its learning rate schedule and gradient clipping."""

from typing import Any, Literal

from pydantic import field_validator

from coati_rl.config.fields import Section, experiment

LearningRateSchedule = Literal["cosine", "linear", "constant"]
MIN_LR_RATIO = 0.1


class OptimizerConfig(Section):
    """Learning rate and its schedule, AdamW, clipping."""

    learning_rate: float = experiment(1e-6, "Peak learning rate.", short="-lr", gt=0)
    lr_schedule: LearningRateSchedule = experiment(
        "cosine", "How the learning rate falls from its peak to --min-lr-ratio times it; constant: it does not."
    )
    min_lr_ratio: float = experiment(MIN_LR_RATIO, "The learning rate ends at this fraction of its peak.", ge=0, le=1)
    warmup_ratio: float = experiment(
        0.0, "Fraction of the run in which the learning rate rises from 0 to its peak.", ge=0, lt=1
    )
    warmup_steps: int = experiment(0, "The same, in optimizer steps.", ge=0)
    weight_decay: float = experiment(0.01, "AdamW's weight decay.", ge=0)
    adam_betas: tuple[float, float] = experiment(
        (0.9, 0.999), "AdamW's decay rates of the means of gradients and of their squares.", metavar="BETA1,BETA2"
    )
    adam_eps: float = experiment(1e-8, "AdamW's term that keeps its denominator above 0.", gt=0)
    max_grad_norm: float = experiment(1.0, "Gradients are clipped to this global norm.", gt=0)

    @field_validator("adam_betas", mode="before")
    @classmethod
    def _split_betas(cls, value: Any) -> Any:
        try:
            first, second = value.split(",") if isinstance(value, str) else value
            betas = float(first), float(second)
        except (TypeError, ValueError) as error:
            raise ValueError("give two numbers, BETA1,BETA2, like 0.9,0.95") from error
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each must be at least 0 and below 1, like 0.9,0.95")
        return betas
