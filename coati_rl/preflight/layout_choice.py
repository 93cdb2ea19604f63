"""Choose how trainers share a model out, and the engines' share of a GPU, where the user has left them open.

On GPUs alone, and by the forecast and the test that refuse a run. What was given stays as it is. The plan says what was
chosen, as flags that pin it, and why.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coati_rl.checkpoint.former_settings import former_layout
from coati_rl.config import Config
from coati_rl.config.plan import resolve_precision
from coati_rl.config.training import TrainingConfig
from coati_rl.memory.forecast import gib
from coati_rl.memory.layouts import PLAIN, is_layout_given, layout_change, layout_flags, layouts
from coati_rl.memory.nearest import Change
from coati_rl.memory.run_engines import chosen_share
from coati_rl.memory.run_memory import Machine
from coati_rl.plugins import is_plugin
from coati_rl.preflight.job_memory import backend_of, is_buildable
from coati_rl.preflight.memory_check import RECOMPUTED, MemoryCheck, this_machine
from coati_rl.preflight.resources import Job
from coati_rl.types import Device

ASSUMED_GPU_BYTES = 80 * 2**30  # of GPUs that are unknown: most of those that models are trained on have at least that
ROOM = 0.1  # that a layout should leave of a GPU, for CUDA's context, its libraries and memory that is fragmented
BOUNDS = frozenset(("train_microbatch_size", "max_tokens_per_microbatch"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Hold settings that were chosen, by flat name, and a clause that says why."""

    flags: str  # that set the same, whatever the device
    values: Mapping[str, Any]
    why: str


def choose_layout(
    check: MemoryCheck[Job], *, given: Collection[str], former: Mapping[str, Any] | None = None
) -> Choice | None:
    """Return the fastest layout that fits; None if there is nothing to choose.

    One that leaves a tenth of the GPU goes before others, and so do recomputed activations and a smaller token budget,
    where these are open as well; rows that trainers share, which also change the prompts of a step, come after all of
    this, then parts of matrices or of the layers, and shards of such parts last. A layout that was given stays, and so
    does that of an optimizer of the user's own, which may need whole parameters.

    Args:
        check: of the job in its default layout, on GPUs of known memory.
        given: the names of the settings of sizes and layouts that the user gave.
        former: the layout of the run that this one resumes, which is kept if it fits: prompts of a step follow from
            data-parallel copies.
    """
    config = check.config
    is_open = not is_layout_given(config) and not is_plugin(config.optimizer.optimizer)
    flat = config.flat()
    own = layout_change(config, {name: flat[name] for name in PLAIN})
    kept = {name: flat[name] for name in PLAIN if name in given}
    candidates = (each for each in _candidates(check, former) if each.values.items() >= kept.items())
    changes = [each for each in candidates if check.changed(each) is not None] if is_open else [own]
    if not changes:  # for another reason than the layout, which is reported by name
        return None
    first, gpu = changes[0], gib(check.machine.gpu_bytes or 0)
    if is_open and first.values == former and check.trainers_fit(first, share=1.0):
        return Choice(flags=_pinned(first), values=first.values, why="the layout of the run that is resumed")
    found, what = _first_that_fits(check, changes, given=given)
    spare = what.format(gpu=gpu)
    if not is_open and found.values == own.values:
        return None
    if not is_open:
        why = f"what leaves the layout as it is and {spare}"
        return Choice(flags=_other_flags(config, found), values=found.values, why=why)
    if found is first and config.parallel.num_trainers == 1:
        why = "one trainer"
    else:
        lost = "" if found is first else f" ({_pinned(first)} needs {gib(check.trainer_bytes(first))} a trainer)"
        why = f"the fastest layout that {spare}{lost}"
    return Choice(flags=f"{_pinned(found)} {_other_flags(config, found)}".strip(), values=found.values, why=why)


def _first_that_fits(
    check: MemoryCheck[Job], changes: Sequence[Change], *, given: Collection[str]
) -> tuple[Change, str]:
    """Return the layout to take, with other settings where that is needed, and in how far it fits."""
    roomy, tight = (partial(check.trainers_fit, share=share) for share in (1 - ROOM, 1.0))
    if "gradient_checkpointing" not in given and not check.config.parallel.recomputes_activations:
        changes = [*changes, *(each | RECOMPUTED for each in changes)]
    kinds: tuple[list[Change], ...] = ([], [], [], [])  # whole, with shared rows, cut, and both sharded and cut
    for each in changes:
        is_cut = each.values["tensor_parallel_size"] * each.values["pipeline_parallel_size"] > 1
        shares_rows = each.values["context_parallel_size"] > check.config.parallel.context_parallel_size
        kinds[2 + (each.values["plugin"] == "fsdp2") if is_cut else shares_rows].append(each)
    for among in kinds:
        if found := next(filter(roomy, among), None):
            return found, "fits GPUs of {gpu} with a tenth to spare"
        if BOUNDS.isdisjoint(given):
            budgets = [(each, budget) for each in among if (budget := check.budget(each, roomy)) is not None]
            if budgets:
                layout, budget = max(budgets, key=lambda each: _tokens(each[1]))
                return layout | budget, "fits GPUs of {gpu} with a tenth to spare"
        if found := next(filter(tight, among), None):
            return found, "fits GPUs of {gpu}"
    if found := next((each for each in changes if check.with_change(each).refusal() is None), None):
        return found, "may fit GPUs of {gpu}, with short samples"
    return min(
        changes, key=partial(check.trainer_bytes, is_sure=True)
    ), "comes nearest to GPUs of {gpu}"  # which is refused


def _candidates(check: MemoryCheck[Job], former: Mapping[str, Any] | None) -> Iterator[Change]:
    config = check.config
    if former is not None:
        yield layout_change(config, dict(former))
    yield from layouts(config, is_bf16=resolve_precision(config, check.machine.device) == "bf16")


def _pinned(change: Change) -> str:
    """Return the flags of a layout with which none is chosen."""
    return layout_flags(change.values, PLAIN) or "-zero 0"


def _tokens(change: Change) -> int:
    return int(change.values.get("max_tokens_per_microbatch", 0))


def _other_flags(config: TrainingConfig, change: Change) -> str:
    """Return the flags beside those of the layout; a budget that is given leaves other bounds at their own defaults."""
    parallel, flags = config.parallel, list[str]()
    if _tokens(change):
        flags += [f"-tmbs {parallel.train_microbatch_size} --max-tokens-per-microbatch {_tokens(change)}"]
    if change.values.get("gradient_checkpointing") or (_tokens(change) and parallel.gradient_checkpointing):
        flags += [RECOMPUTED.flags]
    return " ".join(flags)


def open_choices(config: TrainingConfig, device: Device) -> tuple[str, ...]:
    """Return a warning if a layout will be chosen of which a plan without the model knows nothing."""
    is_open = device == "cuda" and not is_layout_given(config)
    return ("the layout of the trainers is chosen when the model is here",) if is_open else ()


def with_choices(
    config: Job,
    hf_config: Any,
    device: Device,
    *,
    given: Collection[str],
    memory_check: Callable[[Job, Machine], MemoryCheck[Job]],
    gpu_memory: int | None = None,
) -> tuple[Job, tuple[str, ...]]:
    """Set the layout of trainers and the engines' share of a GPU where the user has left them open.

    Args:
        config: of the job, with the defaults of its device.
        hf_config: transformers config of the trained model.
        device: of the job.
        given: the names of the settings of sizes and layouts that the user gave.
        memory_check: of the job with settings, on a machine.
        gpu_memory: bytes of the smallest GPU; None: that of this machine, if it has the job's.
    Returns: the config, and a line of the plan if anything was chosen.
    """
    if device == "cpu" or not is_buildable(hf_config):
        return config, ()
    machine, is_assumed = _known_machine(config, device, gpu_memory)
    choices = list[Choice]()
    if isinstance(config, Config) and "gpu_memory_utilization" not in given and config.sampling.backend == "vllm":
        backend = backend_of(config, hf_config, device)
        share = chosen_share(config, hf_config, backend, gpu_bytes=machine.gpu_bytes or 0)
        values = {"gpu_memory_utilization": share}
        why = "vLLM's share leaves room for new weights"
        choices.append(Choice(flags=f"--gpu-memory-utilization {share:g}", values=values, why=why))
        config = config.with_changes(**values)
    layout = choose_layout(memory_check(config, machine), given=given, former=former_layout(config))
    if layout is not None:
        choices = [layout, *choices]
        config = config.with_changes(**layout.values)
    if not choices:
        return config, ()
    assumed = f"; GPUs are taken to have {gib(ASSUMED_GPU_BYTES)}, as theirs is unknown" if is_assumed else ""
    flags, reasons = " ".join(each.flags for each in choices), "; ".join(each.why for each in choices)
    return config, (f"{'chosen':<24}{flags}: {reasons}{assumed}",)


def _known_machine(config: TrainingConfig, device: Device, gpu_memory: int | None) -> tuple[Machine, bool]:
    """Return the machine that is planned for, and whether its GPUs' memory is an assumption."""
    machine = this_machine(config, device, gpu_memory)
    if machine.gpu_bytes is not None:
        return machine, False
    return replace(machine, gpu_bytes=ASSUMED_GPU_BYTES), True
