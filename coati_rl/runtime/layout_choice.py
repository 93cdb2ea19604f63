"""Choose how trainers share a model out, and the engines' share of a GPU, where the user has left them open.

On GPUs alone, and by the forecast and the test that refuse a run. What was given stays as it is. The plan says what was
chosen, as flags that pin it, and why.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coati_rl.config.plan import resolve_precision
from coati_rl.memory.forecast import gib
from coati_rl.memory.layouts import PLAIN, is_layout_given, layout_change, layout_flags, layouts
from coati_rl.memory.nearest import Change
from coati_rl.plugins import is_plugin
from coati_rl.runtime.memory_check import Job, MemoryCheck

ASSUMED_GPU_BYTES = 80 * 2**30  # of GPUs that are unknown: most of those that models are trained on have at least that
ROOM = 0.1  # that a layout should leave of a GPU, for CUDA's context, its libraries and memory that is fragmented


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Hold settings that were chosen, by flat name, and a clause that says why."""

    flags: str  # that set the same, whatever the device
    values: Mapping[str, Any]
    why: str


def choose_layout(
    check: MemoryCheck[Job], *, former: Mapping[str, Any] | None = None, may_lower_budget: bool = False
) -> Choice | None:
    """Return the fastest layout that fits, with room to spare if one has it; None if the user has chosen.

    Nor is a layout chosen for an optimizer of the user's own, which may need whole parameters.

    Args:
        check: of the job in its default layout, on GPUs of known memory.
        former: the settings of the run that this one resumes; its layout is kept if there are as many trainers and it
            fits, as prompts of a step follow from data-parallel copies.
        may_lower_budget: the token budget of a micro-batch is a default as well.
    """
    config = check.config
    if is_layout_given(config) or is_plugin(config.optimizer.optimizer):
        return None
    changes = [each for each in _candidates(check, former) if check.changed(each) is not None]
    first = changes[0]
    found = next((each for each in changes if _has_room(check, each)), None)
    spare = "" if found is None else " with a tenth to spare"
    found = found or next((each for each in changes if check.fits(each)), None)
    if found is None and may_lower_budget:
        with_budgets = ((each, check.budget(each)) for each in changes)
        found = next((each | budget for each, budget in with_budgets if budget is not None), None)
    found = found or next((each for each in changes if check.with_change(each).refusal() is None), None)
    if found is None:  # which is refused, with what it lacks
        found = min(changes, key=lambda each: check.trainer_bytes(each))
        why = "no layout fits, and it needs least"
    elif config.parallel.num_trainers == 1:
        why = "one trainer"
    elif former is not None and found is first:
        why = "the layout of the run that is resumed"
    else:
        needs = gib(check.trainer_bytes(first))
        lost = "" if found is first else f" ({_pinned(first)} needs {needs} a trainer)"
        why = f"the fastest layout that fits GPUs of {gib(check.machine.gpu_bytes or 0)}{spare}{lost}"
    return Choice(flags=_pinned(found), values=found.values, why=why)


def _candidates(check: MemoryCheck[Job], former: Mapping[str, Any] | None) -> Iterator[Change]:
    config = check.config
    if former is not None:
        yield layout_change(config, dict(former))
    yield from layouts(config, is_bf16=resolve_precision(config, check.machine.device) == "bf16")


def _has_room(check: MemoryCheck[Job], change: Change) -> bool:
    return check.trainer_bytes(change) <= (1 - ROOM) * (check.machine.gpu_bytes or 0) and check.fits(change)


def _pinned(change: Change) -> str:
    """Return the flags with which nothing is chosen and the values are these."""
    layout = {name: change.values[name] for name in PLAIN}
    budget = change.values.get("max_tokens_per_microbatch")
    of_budget = [] if budget is None else [f"--max-tokens-per-microbatch {budget}"]
    return " ".join([layout_flags(layout, PLAIN) or "-zero 0", *of_budget])


def chosen_lines(choices: list[Choice], *, is_assumed: bool) -> tuple[str, ...]:
    """Return a line of the plan that says what was chosen; none if nothing was.

    Args:
        choices: in the order of the line.
        is_assumed: the GPUs' memory is unknown.
    """
    if not choices:
        return ()
    assumed = f"; GPUs are taken to have {gib(ASSUMED_GPU_BYTES)}, as theirs is unknown" if is_assumed else ""
    flags, reasons = " ".join(each.flags for each in choices), "; ".join(each.why for each in choices)
    return (f"{'chosen':<24}{flags}: {reasons}{assumed}",)
