"""Forecast a run's memory before anything starts, and refuse what cannot fit with the nearest flags that do.

A run is refused if what is sure to be in use, less the forecast's margin, exceeds the memory. A token budget is taken
at its word: micro-batches are filled up to it. Where only a number of samples bounds micro-batches, their real lengths
are not known before the run, and what the longest ones would take is a warning.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic

from coati_rl.config import Config
from coati_rl.config.parallel import ParallelConfig
from coati_rl.config.plan import resolve_precision
from coati_rl.config.rules import nearest_flags
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.memory.capacity import available_bytes, total_bytes
from coati_rl.memory.forecast import ENGINE_RANK, MARGIN, Forecast, ProcessMemory, gib, listed
from coati_rl.memory.layouts import PLAIN, layout_flags, layouts, plain_layout
from coati_rl.memory.nearest import Change, Fits, largest_that_fits, nearest_changes
from coati_rl.memory.run_memory import Machine
from coati_rl.memory.trainer import HEAP, Parts
from coati_rl.preflight.resources import Job, gpu_bytes
from coati_rl.torchrun import is_one_machine
from coati_rl.types import Device

RECOMPUTED = Change(flags="--gradient-checkpointing", values={"gradient_checkpointing": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryCheck(Generic[Job]):
    """Compare a job's forecast with the memory of its devices."""

    config: Job
    forecast: Callable[[Job], Forecast]  # of micro-batches of the longest samples, at most at the token budget
    sure: Callable[[Job], Forecast]  # of what every run of the job has at least
    is_valid: Callable[[Job], bool]  # whether a job with other settings passes the rules
    machine: Machine
    host_available: int | None  # bytes; None: the run's processes are elsewhere, or unknown
    models: Sequence[Any]  # transformers configs of the job's models, the trained one first

    def run(self) -> tuple[Forecast, list[str]]:
        """Return the forecast, and warnings. Raises: ConfigError for a run that cannot fit."""
        if problem := self.refusal():
            raise ConfigError(f"{problem}; {self._nearest()}")
        whole = self.forecast(self.config)
        unknown = self._unknown_gpus(whole)
        problem = self._problem(whole, margin=0.0)
        if problem is None:
            return whole, unknown
        longest = "" if self._is_bound_by_budget() else ", if a micro-batch has the longest samples"
        return whole, [f"{problem}{longest}; {self._nearest()}", *unknown]

    def refusal(self) -> str | None:
        """Return why the run cannot fit; None if it may."""
        by_budget = self._is_bound_by_budget()
        sure = (self.forecast if by_budget else self.sure)(self.config).without(HEAP)
        return self._problem(sure, margin=MARGIN)

    def changed(self, change: Change | None) -> Job | None:
        """Return the config with a change, or with none; None if it breaks a rule."""
        if change is None:
            return self.config
        config = self.config.with_changes(**change.values)
        return config if self.is_valid(config) else None

    def with_change(self, change: Change) -> "MemoryCheck[Job]":
        """Return the check of the job with a change."""
        return dataclasses.replace(self, config=self.config.with_changes(**change.values))

    def trainer_bytes(self, change: Change, *, is_sure: bool = False) -> int:
        """Return what a trainer takes of its device with a change; `is_sure`: what every run of the job takes."""
        forecast = (self.sure if is_sure else self.forecast)(self.config.with_changes(**change.values))
        return _rank_bytes(forecast, "trainer")

    def trainers_fit(self, change: Change, *, share: float) -> bool:
        """Whether with a change a trainer fits a share of its GPU, and all processes the host."""
        config = self.changed(change)
        if config is None:
            return False
        forecast, available = self.forecast(config), self.host_available
        fits_host = available is None or forecast.host_bytes <= available
        return fits_host and _rank_bytes(forecast, "trainer") <= share * (self.machine.gpu_bytes or 0)

    def fits(self, change: Change | None) -> bool:
        """Whether the job with a change fits, whatever its samples."""
        config = self.changed(change)
        return config is not None and self._problem(self.forecast(config), margin=0.0) is None

    def budget(self, change: Change | None, fits: Fits | None = None) -> Change | None:
        """Return the largest token budget with which the job with a change fits; None if none does.

        Args:
            change: of other settings; None: none.
            fits: whether the job with a change fits; None: as `fits` says.
        """
        config, test = self.changed(change), fits or self.fits
        if config is None:
            return None
        least, current = self._budgets(config)
        tokens = largest_that_fits(
            least, current, lambda size: test(_budget(size) if change is None else change | _budget(size))
        )
        return None if tokens is None else _budget(tokens)

    def _unknown_gpus(self, forecast: Forecast) -> list[str]:
        """Return a warning with the memory that GPUs must have, where theirs is unknown."""
        if self.machine.device == "cpu" or self.machine.gpu_bytes is not None:
            return []
        largest = forecast.largest
        return [
            f"the memory of the run's GPUs is unknown: a {largest.name} needs {gib(largest.device_bytes)} of its GPU; "
            "it is compared when the cluster is joined"
        ]

    def _is_bound_by_budget(self) -> bool:
        """Whether micro-batches are taken to be as large as the token budget: if there is a smaller one that fits.

        To refuse such a run costs nothing, as a smaller budget changes no gradient. A budget has to hold a longest
        sample, however, and real ones may be far shorter.
        """
        budget = self.config.parallel.max_tokens_per_microbatch
        if budget is None:
            return False
        least, _ = self._budgets(self.config)
        smaller = self.config.with_changes(max_tokens_per_microbatch=min(least, budget))
        return self._problem(self.forecast(smaller), margin=0.0) is None

    def _problem(self, forecast: Forecast, *, margin: float) -> str | None:
        """Say what exceeds its memory by more than the margin, a fraction, and by which setting; None if all fits."""
        largest, gpu_memory = forecast.largest, self.machine.gpu_bytes
        on_gpu = self.machine.device == "cuda"
        if on_gpu and gpu_memory is not None and largest.device_bytes * (1 - margin) > gpu_memory:
            return (
                f"{self._setting(largest, largest.parts)}: a {largest.name} needs {gib(largest.device_bytes)} of its "
                f"GPU, which has {gib(gpu_memory)} ({listed(largest.parts)})"
            )
        if self.host_available is None or forecast.host_bytes * (1 - margin) <= self.host_available:
            return None
        processes = sorted(forecast.processes, key=lambda each: -each.host_bytes(forecast.device))
        each = [f"{one.count} x {one.name} of {gib(one.host_bytes(forecast.device) // one.count)}" for one in processes]
        parts = processes[0].on_one_host(forecast.device)
        return (
            f"{self._setting(processes[0], parts)}: the run needs {gib(forecast.host_bytes)} of this machine's memory, "
            f"of which {gib(self.host_available)} are available ({'; '.join(each)}: {listed(parts)})"
        )

    def _setting(self, process: ProcessMemory, parts: Parts) -> str:
        """Name the setting that the largest of a process's parts follows from, with its value."""
        parallel = self.config.parallel
        largest = max(parts, key=lambda name: parts[name], default="")
        if process.name == "trainer" and largest in ("activations", "LM head", "backward"):
            budget = parallel.max_tokens_per_microbatch
            return f"-tmbs {parallel.train_microbatch_size}" if budget is None else _budget(budget).flags
        return f"--model {self.config.model.model}"

    def _nearest(self) -> str:
        """Return the smallest changes of settings with which the run fits, whatever its samples, as text."""
        found = nearest_changes([*self._changes()], self.fits, budget=self.budget)
        if not found:
            return f"no other settings fit; use a smaller model, or a machine with more memory{self._more_gpus()}"
        return f"nearest: {', or '.join(change.flags for change in found)}"

    def _more_gpus(self) -> str:
        """Say with how many GPUs of this size trainers and engines hold the model, if it is that which does not fit."""
        gpu_memory = self.machine.gpu_bytes
        if gpu_memory is None or self.machine.device == "cpu":
            return ""
        needed = self._engines_that_hold(gpu_memory), self._trainers_that_hold(gpu_memory)
        if None in needed or not any(needed):
            return ""
        return f": {' '.join(filter(None, needed))} holds it on GPUs of {gib(gpu_memory)}"

    def _engines_that_hold(self, gpu_memory: int) -> str | None:
        """Return the flag of the narrowest engines of which a rank fits its GPU; empty: they do; None: none does."""
        width = least = int(self.config.flat().get("producer_tensor_parallel_size") or 1)
        while width <= 64 * least:
            config = self.config.with_changes(producer_tensor_parallel_size=width) if width > least else self.config
            if (width == least or self.is_valid(config)) and _rank_bytes(self.sure(config), ENGINE_RANK) <= gpu_memory:
                return f"-ptp {width}" if width > least else ""
            width *= 2
        return None

    def _trainers_that_hold(self, gpu_memory: int) -> str | None:
        """Return the flags of the fewest trainers that hold the model; empty: the run's do; None: no number does."""
        config, parallel = self.config, self.config.parallel
        if self.trainer_bytes(Change(flags="", values={}), is_sure=True) <= gpu_memory:
            return ""
        values, own = {**plain_layout(config), "plugin": "fsdp2"}, config.flat()
        # The config's layout was given or chosen: flags of what differs from it, or from what no flag says.
        others = {name: own[name] if own[name] != values[name] else PLAIN[name] for name in PLAIN}
        sharded = Change(flags=layout_flags(values, others), values=values)
        if not parallel.recomputes_activations:
            sharded |= RECOMPUTED
        least, _ = self._budgets(config)
        for doublings in range(1, 11):
            trainers, cp = (n * 2**doublings for n in (parallel.num_trainers, parallel.context_parallel_size))
            change = Change(flags=f"-t {trainers}", values={"num_trainers": trainers}) | sharded
            shared = Change(flags=f"--context-parallel {cp}", values={"context_parallel_size": cp})
            for each in (change, change | _budget(least), change | shared):
                changed = config.with_changes(**each.values)
                sizes = " ".join(nearest_flags(changed)[:1]) if isinstance(changed, Config) else ""
                if self.trainer_bytes(each) <= gpu_memory and (sizes or self.is_valid(changed)):
                    bounds = [flags for flags in _bounds(changed) if "-tmbs" in sizes and flags not in each.flags]
                    return " ".join(filter(None, [each.flags, sizes, *bounds]))
        return None

    def _budgets(self, config: Job) -> tuple[int, int]:
        """Return the least token budget, that of a longest row, and the tokens that now bound a micro-batch."""
        budget, least = config.parallel.max_tokens_per_microbatch, config.UNIT * config.max_sample_tokens
        group = config.flat().get("num_generations") or 1
        return least, budget or least * max(group, config.parallel.train_microbatch_size)

    def _changes(self) -> Iterator[Change]:
        """Yield changes of one setting each, the smallest first; those of precision last, as it changes results."""
        config, flat = self.config, self.config.flat()
        parallel = config.parallel
        if not parallel.recomputes_activations:
            yield RECOMPUTED
        if self.machine.device == "cuda" and not parallel.offload_activations:
            yield Change(flags="--offload-activations", values={"offload_activations": True})
        if flat.get("precompute_reference") is False:
            yield Change(flags="--precompute-reference", values={"precompute_reference": True})
        in_flight: int = getattr(config, "sequences_in_flight", 0)
        sequences = int(flat.get("max_num_seqs") or in_flight)
        while sequences > 1:
            sequences //= 2
            yield Change(flags=f"--max-num-seqs {sequences}", values={"max_num_seqs": sequences})
        is_bf16 = resolve_precision(config, self.machine.device) == "bf16"
        yield from (each for each in layouts(config, is_bf16=is_bf16) if each.flags)
        yield from self._wider_engines()
        if "all" not in parallel.offload:
            yield Change(flags="--offload all", values={"offload": ("all",)})
        if flat.get("logprob_gap_tokens"):
            yield Change(flags="--logprob-gap-tokens 0", values={"logprob_gap_tokens": 0})
        for engines in range(config.num_producers - 1, 0, -1):
            yield Change(flags=f"-i {engines}", values={"num_inferencer": engines})
        if config.model.precision == "fp32" or (config.model.precision is None and self.machine.device == "cpu"):
            yield Change(flags="--precision bf16", values={"precision": "bf16"})

    def _wider_engines(self) -> Iterator[Change]:
        """Yield engines of more ranks, on as many GPUs and for as many prompts where these can be divided."""
        parallel = self.config.parallel
        if not isinstance(parallel, ParallelConfig) or self.machine.device == "cpu":
            return
        ranks = parallel.num_inferencer * parallel.producer_tensor_parallel_size
        for width in (2, 4, 8):
            if parallel.producer_tensor_parallel_size < width and ranks % width == 0:
                engines = ranks // width
                prompts = parallel.inference_batch_size * parallel.num_inferencer // engines
                values = {"producer_tensor_parallel_size": width, "num_inferencer": engines}
                flags = f"-ptp {width} -i {engines} -ibs {prompts}"
                yield Change(flags=flags, values={**values, "inference_batch_size": prompts})


def this_machine(config: TrainingConfig, device: Device, gpu_memory: int | None = None) -> Machine:
    """Return what the forecast of a job needs to know of this machine, or of a cluster whose smallest GPU is known."""
    if device == "cuda" and gpu_memory is None:
        gpu_memory = gpu_bytes(config)
    return Machine(device=device, host_bytes=total_bytes(), gpu_bytes=gpu_memory)


def host_memory(config: TrainingConfig, device: Device) -> int | None:
    """Return the bytes that a run can take on this machine; None if it will run elsewhere."""
    if config.cluster.master_address or not is_one_machine() or (device == "cuda" and gpu_bytes(config) is None):
        return None
    return available_bytes()


def passes(rules: Callable[[Any], None], *others: Callable[[Any], None]) -> Callable[[Any], bool]:
    """Return a test whether a config passes rules that raise ConfigError."""

    def is_valid(config: Any) -> bool:
        try:
            for rule in (rules, *others):
                rule(config)
        except ConfigError:
            return False
        return True

    return is_valid


def _rank_bytes(forecast: Forecast, name: str) -> int:
    """Return what a process of a kind takes of its device; 0 if a job has none."""
    return next((each.device_bytes for each in forecast.processes if each.name == name), 0)


def _bounds(config: TrainingConfig) -> Iterator[str]:
    """Yield the flags of what bounds a micro-batch's memory, which on GPUs are no defaults beside -tmbs."""
    budget = config.parallel.max_tokens_per_microbatch
    if budget is not None:
        yield _budget(budget).flags
    if config.parallel.gradient_checkpointing:
        yield RECOMPUTED.flags


def _budget(tokens: int) -> Change:
    return Change(flags=f"--max-tokens-per-microbatch {tokens}", values={"max_tokens_per_microbatch": tokens})
