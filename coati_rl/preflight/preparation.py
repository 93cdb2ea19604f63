"""Prepare a job from a checked config: find model and device, read and tokenise its rows, check them, make the plan.

What a kind of job does in its own way is in `prepare` and `prepare_offline`. Mistakes in files are reported before
anything starts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from coati_rl.checkpoint.former_settings import with_former_settings
from coati_rl.checkpoint.resumed_run import ResumedRun
from coati_rl.config.gpu_rules import with_device_defaults
from coati_rl.config.plan import TrainingPlan, resolve_precision
from coati_rl.config.training import TrainingConfig
from coati_rl.memory.run_memory import Machine
from coati_rl.model_files.check import Use
from coati_rl.own_optimizer import check_own_functions
from coati_rl.preflight.adapter import adapter_warnings, with_adapter
from coati_rl.preflight.job_memory import check_memory
from coati_rl.preflight.layout_choice import open_choices, with_choices
from coati_rl.preflight.memory_check import MemoryCheck, this_machine
from coati_rl.preflight.other_models import OtherModel, with_other_model
from coati_rl.preflight.prepared import PreparedJob, unchecked
from coati_rl.preflight.resources import (
    checked_model_config,
    precision_warnings,
    read_model_config,
    resolve_model,
    sharding_warnings,
    with_tokenizer,
)
from coati_rl.preflight.sample_rows import TryModel, with_sample_rows
from coati_rl.preflight.saved_tokenizer import Encoded, check_saved_tokenizer
from coati_rl.processes.exit_messages import print_lines
from coati_rl.processes.slow_phase import slow_phase
from coati_rl.reading.chat_template import unread_warnings
from coati_rl.types import Device

Job = TypeVar("Job", bound=TrainingConfig)
Rows = TypeVar("Rows")  # as they are read
Inputs = TypeVar("Inputs")  # what is made of them
Result = TypeVar("Result", bound=PreparedJob)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found(Generic[Job, Inputs]):
    """Hold what a job trains on, as far as it is known."""

    config: Job  # as the model asks for it
    inputs: Inputs
    memory: tuple[str, ...] = ()  # lines of the plan, of the layout that was chosen and of memory
    check_gpus: Callable[[int], object] = unchecked  # see `PreparedJob`
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Preparation(ABC, Generic[Job, Rows, Inputs, Result]):
    """Prepare jobs of one kind."""

    check_layout: Callable[..., None]  # of trainers; ConfigError if a model (its config) cannot be cut as asked
    try_model: TryModel  # of trainers; tries whether a model computes packed samples apart
    is_dry_run: bool  # plan for devices that this machine lacks, and do not fetch a model

    def prepare(self, config: Job) -> Result:
        """Resolve device and model, read, validate and tokenise the rows, and plan.

        Args:
            config: whose rules were checked.
        Raises: ConfigError.
        """
        config, of_resume = with_former_settings(config)
        config = with_adapter(config)
        self.check_functions(config)
        device, warnings = self.find_device(config)
        say = partial(print_lines, prog=config.prog())
        with slow_phase("preparing, 1 of 3: the rows are read", say):
            rows = self.read_rows(config)
        warnings += [
            *self.warnings(config, rows),
            *sharding_warnings(config, device),
            *precision_warnings(config, device),
        ]
        with slow_phase("preparing, 2 of 3: the model's files are looked up", say):
            directory = resolve_model(config.model.model, is_dry_run=self.is_dry_run)
        if directory is None:
            found = self._without_model(config, rows, device)
        else:
            with slow_phase("preparing, 3 of 3: the model is checked and the rows are tokenised", say):
                found = self._with_model(config, rows, directory, device)
        plan = self.plan(found, device)
        resume = self.open_resume(found)
        if resume is not None:
            plan = replace(plan, num_steps=resume.num_steps)
        return self.prepared(
            found,
            rows,
            config=found.config,
            plan=plan,
            warnings=(*of_resume, *warnings, *found.warnings),
            resume=resume,
            check_gpus=found.check_gpus,
        )

    def _without_model(self, config: Job, rows: Rows, device: Device) -> Found[Job, Inputs]:
        """Return what a dry run can say without the model."""
        missing = f"model {config.model.model} is not on this machine: {self.unchecked(config)} are not checked"
        return Found(
            config=with_device_defaults(config, device),
            inputs=self.without_tokens(rows),
            warnings=(missing, *open_choices(config, device)),
        )

    def _with_model(self, config: Job, rows: Rows, directory: Path, device: Device) -> Found[Job, Inputs]:
        """Tokenise the rows, and check what depends on the model in `directory`. Raises: ConfigError."""
        config = config.with_changes(model=str(directory))
        hf_config = read_model_config(directory)
        config, given = self.within_positions(config, hf_config), config.parallel.model_fields_set
        config, chosen = with_choices(
            with_device_defaults(config, device),
            hf_config,
            device,
            given=given,
            memory_check=lambda config, machine: self.memory_check(config, hf_config, machine, None),
        )
        self.check_layout(config, hf_config)
        precision = resolve_precision(config, device)
        hf_config, of_files = checked_model_config(
            directory, *self.uses(config), precision=precision, is_dry_run=self.is_dry_run
        )
        config, tokenizer, of_models = self._with_models(config, rows, directory, hf_config)
        config = self.completed(config, hf_config, device)
        inputs = self.make_inputs(config, rows, tokenizer, hf_config)
        check_saved_tokenizer(config, tokenizer, partial(self.encoded, config, rows))

        def memory_of(gpu_memory: int | None) -> tuple[tuple[str, ...], list[str]]:
            machine = this_machine(config, device, gpu_memory)
            return check_memory(self.memory_check(config, hf_config, machine, inputs))

        memory, of_memory = memory_of(None)
        return Found(
            config=config,
            inputs=inputs,
            memory=(*chosen, *memory),
            check_gpus=memory_of,
            warnings=(*of_files, *of_models, *adapter_warnings(config, hf_config), *of_memory),
        )

    def _with_models(self, config: Job, rows: Rows, directory: Path, hf_config: Any) -> tuple[Job, Any, list[str]]:
        """Return the config as the job's models ask for it, the tokenizer, and warnings. Raises: ConfigError."""
        renders = self.needs_chat_template(config, rows)
        config, tokenizer = with_tokenizer(config, directory, needs_chat_template=renders)
        warnings = [*unread_warnings(tokenizer, config.data.chat_template_kwargs, is_applied=renders)]
        models = {"--model": str(directory)}
        for other in self.other_models(config):
            config, models[other.flag], of_model = with_other_model(
                config, other, tokenizer, hf_config, check_layout=self.check_layout, is_dry_run=self.is_dry_run
            )
            warnings += of_model
        config, of_rows = with_sample_rows(config, models, try_model=self.try_model)
        return config, tokenizer, [*warnings, *of_rows]

    def check_functions(self, config: Job) -> None:
        """Try a user's own functions. Raises: ConfigError."""
        check_own_functions(config)

    @abstractmethod
    def find_device(self, config: Job) -> tuple[Device, list[str]]:
        """Return the device, and warnings. Raises: ConfigError if the job cannot run there."""

    @abstractmethod
    def read_rows(self, config: Job) -> Rows:
        """Read and validate the rows. Raises: ConfigError naming the row."""

    @abstractmethod
    def warnings(self, config: Job, rows: Rows) -> Iterable[str]:
        """Return the warnings about settings. Raises: ConfigError for rows that do not go with them."""

    @abstractmethod
    def unchecked(self, config: Job) -> str:
        """Name what cannot be checked without the model."""

    @abstractmethod
    def without_tokens(self, rows: Rows) -> Inputs:
        """Return what is known of the rows without a tokenizer."""

    @abstractmethod
    def within_positions(self, config: Job, hf_config: Any) -> Job:
        """Keep the longest sample within the model's positions. Raises: ConfigError if it was given."""

    @abstractmethod
    def uses(self, config: Job) -> tuple[Use, ...]:
        """Return what is done with the model."""

    @abstractmethod
    def needs_chat_template(self, config: Job, rows: Rows) -> bool:
        """Whether rows are rendered with the model's chat template."""

    @abstractmethod
    def other_models(self, config: Job) -> Iterable[OtherModel]:
        """Return the models beside the trained one."""

    def completed(self, config: Job, hf_config: Any, device: Device) -> Job:
        """Set what follows from the model and is not given. Raises: ConfigError."""
        return config

    @abstractmethod
    def make_inputs(self, config: Job, rows: Rows, tokenizer: Any, hf_config: Any) -> Inputs:
        """Tokenise the rows. Raises: ConfigError for those that the model cannot take."""

    @abstractmethod
    def encoded(self, config: Job, rows: Rows, tokenizer: Any) -> Iterator[Encoded]:
        """Yield some rows as a tokenizer encodes them."""

    @abstractmethod
    def memory_check(self, config: Job, hf_config: Any, machine: Machine, inputs: Inputs | None) -> MemoryCheck[Job]:
        """Return the check of the job's memory; without inputs where they are not made yet."""

    @abstractmethod
    def plan(self, found: Found[Job, Inputs], device: Device) -> TrainingPlan:
        """Return the plan. Raises: ConfigError if the rows do not fill a step."""

    @abstractmethod
    def open_resume(self, found: Found[Job, Inputs]) -> ResumedRun | None:
        """Open the checkpoint that the job goes on from. Raises: ConfigError."""

    @abstractmethod
    def prepared(self, found: Found[Job, Inputs], rows: Rows, **common: Any) -> Result:
        """Return the job's inputs; `common` are the fields of `PreparedJob`."""
