"""Check which settings of the optimizer are combined: contradictions are refused."""

from collections.abc import Iterator

from coati_rl.config.fields import shown, spelling
from coati_rl.config.optimizer import SCHEDULE_NAMES, OptimizerConfig
from coati_rl.plugins import is_plugin

_OF_ADAMW = ("weight_decay", "weight_decay_exempt", "adam_betas", "adam_eps")


def optimizer_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield the contradictions between settings, each with a remedy."""
    fields = OptimizerConfig.model_fields
    ratio, steps, schedule = optimizer.warmup_ratio, optimizer.warmup_steps, optimizer.lr_schedule
    if ratio and steps:
        yield f"--warmup-ratio {ratio:g} with --warmup-steps {steps}: both set the length of the warm-up; give one"
    if schedule not in SCHEDULE_NAMES and not is_plugin(schedule):
        yield f"--lr-schedule {schedule}: unknown; use {', '.join(SCHEDULE_NAMES)}, or FILE.py:FUNCTION"
    if schedule not in ("cosine", "linear") and optimizer.min_lr_ratio != fields["min_lr_ratio"].default:
        yield (
            f"--min-lr-ratio {optimizer.min_lr_ratio:g} with --lr-schedule {schedule}: is the end of cosine and "
            "linear; leave it out"
        )
    if optimizer.optimizer == "adamw":
        return
    if not is_plugin(optimizer.optimizer):
        yield f"--optimizer {optimizer.optimizer}: unknown; use adamw, or FILE.py:FUNCTION"
        return
    for name in _OF_ADAMW:
        value = getattr(optimizer, name)
        if value != fields[name].default:
            flag = spelling(name, fields[name])
            yield f"{flag} {shown(value)} with --optimizer {optimizer.optimizer}: is AdamW's; set it in your function"
