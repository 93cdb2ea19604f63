"""Set the optimizer: AdamW or the user's own, the learning rate's schedule and gradient clipping."""

from typing import Annotated, Any, Literal

from pydantic import field_validator

from coati_rl.config.fields import Section, experiment, function_or

SCHEDULE_NAMES = ("cosine", "linear", "constant")
WeightDecayExempt = Literal["norms_and_biases", "none"]


class OptimizerConfig(Section):
    """Learning rate and its schedule, AdamW, clipping."""

    learning_rate: float = experiment(1e-6, "Peak learning rate.", short="-lr", gt=0)
    lr_schedule: Annotated[str, function_or(*SCHEDULE_NAMES)] = experiment(
        "cosine",
        "How the learning rate falls from its peak to --min-lr-ratio times it: cosine, linear, or constant, where it "
        "does not; or FILE.py:FUNCTION, from progress in [0, 1] to a factor.",
    )
    min_lr_ratio: float = experiment(
        0.1,
        "The learning rate ends at this fraction of its peak.",
        ge=0,
        le=1,
        needs={"lr_schedule": ("cosine", "linear")},
    )
    warmup_ratio: float = experiment(
        0.0, "Fraction of the run in which the learning rate rises from 0 to its peak.", ge=0, lt=1
    )
    warmup_steps: int = experiment(0, "The same, in optimizer steps.", ge=0)
    optimizer: Annotated[str, function_or("adamw")] = experiment(
        "adamw", "adamw, or FILE.py:FUNCTION, which makes a torch optimizer."
    )
    weight_decay: float = experiment(0.01, "AdamW's weight decay.", ge=0, needs={"optimizer": ("adamw",)})
    weight_decay_exempt: WeightDecayExempt = experiment(
        "norms_and_biases",
        "Parameters that AdamW's weight decay leaves alone, as in transformers; none: all decay.",
        needs={"optimizer": ("adamw",)},
    )
    adam_betas: tuple[float, float] = experiment(
        (0.9, 0.999),
        "AdamW's decay rates of the means of gradients and of their squares.",
        metavar="BETA1,BETA2",
        needs={"optimizer": ("adamw",)},
    )
    adam_eps: float = experiment(
        1e-8, "AdamW's term that keeps its denominator above 0.", gt=0, needs={"optimizer": ("adamw",)}
    )
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
