"""Set the optimizer: AdamW, its learning rate schedule and gradient clipping."""

from coati_rl.config.fields import Section, experiment


class OptimizerConfig(Section):
    """Learning rate, weight decay, clipping."""

    learning_rate: float = experiment(
        1e-6, "Peak of the cosine schedule, which ends at a tenth of it.", short="-lr", gt=0
    )
    weight_decay: float = experiment(0.01, "AdamW's weight decay.", ge=0)
    max_grad_norm: float = experiment(1.0, "Gradients are clipped to this global norm.", gt=0)
