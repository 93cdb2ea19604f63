"""Check which settings of the optimizer are combined: contradictions are refused."""

from collections.abc import Iterator

from coati_rl.config.optimizer import MIN_LR_RATIO, OptimizerConfig


def optimizer_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield the contradictions between settings, each with a remedy."""
    ratio, steps = optimizer.warmup_ratio, optimizer.warmup_steps
    if ratio and steps:
        yield f"--warmup-ratio {ratio:g} with --warmup-steps {steps}: both set the length of the warm-up; give one"
    if optimizer.lr_schedule == "constant" and optimizer.min_lr_ratio not in (MIN_LR_RATIO, 1):
        yield (
            f"--min-lr-ratio {optimizer.min_lr_ratio:g} with --lr-schedule constant: the learning rate does not fall; "
            "leave it out, or use cosine or linear"
        )
