"""Check which settings of the optimizer are combined: contradictions are refused."""

from collections.abc import Iterator

from coati_rl.config.optimizer import SCHEDULE_NAMES, OptimizerConfig
from coati_rl.plugins import is_plugin


def optimizer_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield the contradictions between settings, each with a remedy."""
    ratio, steps, schedule = optimizer.warmup_ratio, optimizer.warmup_steps, optimizer.lr_schedule
    if ratio and steps:
        yield f"--warmup-ratio {ratio:g} with --warmup-steps {steps}: both set the length of the warm-up; give one"
    if schedule not in SCHEDULE_NAMES and not is_plugin(schedule):
        yield f"--lr-schedule {schedule}: unknown; use {', '.join(SCHEDULE_NAMES)}, or FILE.py:FUNCTION"
    if optimizer.optimizer != "adamw" and not is_plugin(optimizer.optimizer):
        yield f"--optimizer {optimizer.optimizer}: unknown; use adamw, or FILE.py:FUNCTION"
