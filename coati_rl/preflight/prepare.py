"""Prepare a run from a checked config: find the model, tokenise the prompts, choose the device, make the plan.

Mistakes in files are reported here, before Ray starts.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from coati_rl.build import build_loss
from coati_rl.checkpoint.former_settings import with_former_settings
from coati_rl.checkpoint.resume import open_resume_point
from coati_rl.config import Config
from coati_rl.config.algorithm_rules import algorithm_warnings
from coati_rl.config.control_rules import check_reference
from coati_rl.config.distillation_rules import distillation_warnings
from coati_rl.config.engine_rules import check_engines, check_width, engine_warnings
from coati_rl.config.environment_rules import environment_warnings
from coati_rl.config.gpu_rules import with_device_defaults
from coati_rl.config.plan import make_plan, resolve_precision
from coati_rl.config.reward_rules import reward_warnings
from coati_rl.config.server_rules import stages_on_host
from coati_rl.config.update_rules import with_sync_timeout
from coati_rl.data.dataset import PromptSet
from coati_rl.data.prompt_source import PromptSource
from coati_rl.errors import ConfigError
from coati_rl.estimator import load_estimator
from coati_rl.model_files.check import Use
from coati_rl.own_optimizer import check_own_functions
from coati_rl.preflight.adapter import with_adapter
from coati_rl.preflight.job_memory import check_run_memory, update_bytes
from coati_rl.preflight.job_models import with_run_models
from coati_rl.preflight.layout_choice import open_choices, with_run_choices
from coati_rl.preflight.prepared import unchecked
from coati_rl.preflight.prepared_run import NUM_READ, Prepared
from coati_rl.preflight.prompts import (
    EnvironmentFacts,
    RewardFacts,
    RunRows,
    load_run_rows,
    make_run_prompts,
    make_source,
)
from coati_rl.preflight.resources import checked_model_config, read_model_config, resolve_model, sharding_warnings
from coati_rl.preflight.sample_rows import TryModel
from coati_rl.preflight.saved_tokenizer import check_of_run
from coati_rl.preflight.size_checks import check_length, check_prompts, check_step, check_token_ids, resolve_device
from coati_rl.processes.exit_messages import print_lines
from coati_rl.processes.slow_phase import slow_phase
from coati_rl.transport.choice import choose_backend
from coati_rl.types import Device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """Hold what a run trains on, as far as it is known."""

    config: Config  # as the model asks for it
    train: PromptSet
    evaluation: dict[str, PromptSet]
    num_prompts: int | None  # of a pass; None: without end
    source: PromptSource | None = None
    memory: tuple[str, ...] = ()  # lines of the plan, of the layout that was chosen and of memory
    check_gpus: Callable[[int], object] = unchecked  # see `PreparedJob`
    warnings: tuple[str, ...]


def prepare(
    config: Config,
    *,
    rewards: RewardFacts,
    check_layout: Callable[..., None],
    try_model: TryModel,
    is_dry_run: bool,
    environment: EnvironmentFacts | None = None,
) -> Prepared:
    """Resolve device and model, read, validate and tokenise the datasets, and plan.

    Args:
        config: checked by `rules.check`.
        rewards: what they ask of rows.
        check_layout: of the trainers; raises ConfigError if a model (its transformers config) cannot be cut as asked.
        try_model: of the trainers; tries whether a model computes packed samples apart.
        is_dry_run: plan for devices that this machine lacks, and do not fetch a model.
        environment: what it asks of prompts; None: nothing.
    Raises: ConfigError.
    """
    environment = environment or EnvironmentFacts()
    config, of_resume = with_former_settings(config)
    config = with_adapter(config)
    load_estimator(config.algorithm.advantage_estimator)  # a user's own functions are tried before anything starts
    build_loss(config.algorithm)
    check_own_functions(config)
    device, warnings = resolve_device(config, is_dry_run=is_dry_run)
    check_engines(config, device)
    given = config.parallel.model_fields_set
    config = with_device_defaults(config, device)
    is_one_node, in_turns = not config.cluster.master_address, stages_on_host(config)
    choose_backend(config.sync.weight_transport, device=device, is_one_node=is_one_node, in_turns=in_turns)
    say = partial(print_lines, prog=config.prog())
    with slow_phase("preparing, 1 of 3: the rows are read", say):
        rows = load_run_rows(config, rewards, tools=environment.tools)
    warnings += _warnings(config, device)
    with slow_phase("preparing, 2 of 3: the model's files are looked up", say):
        directory = resolve_model(config.model.model, is_dry_run=is_dry_run)
    if directory is None:
        found = _without_model(config, rows, device)
    else:
        with slow_phase("preparing, 3 of 3: the model is checked and the rows are tokenised", say):
            found = _with_model(
                config,
                rows,
                directory,
                device,
                given=given,
                environment=environment,
                check_layout=check_layout,
                try_model=try_model,
                is_dry_run=is_dry_run,
            )
    return _planned(found, rows, device, (*of_resume, *warnings, *found.warnings))


def _planned(found: _Inputs, rows: RunRows, device: Device, warnings: tuple[str, ...]) -> Prepared:
    """Plan the run and open the checkpoint that it goes on from. Raises: ConfigError."""
    config, train, num_prompts = found.config, found.train, found.num_prompts
    plan = make_plan(
        config, num_prompts=num_prompts, device=device, prompt_tokens=_mean_prompt_tokens(train), memory=found.memory
    )
    check_step(config, plan, num_prompts)
    resume = open_resume_point(config, found.source, num_prompts=num_prompts)
    if resume is not None:
        plan = replace(plan, num_steps=resume.num_steps)
    return Prepared(
        config=config,
        plan=plan,
        train=train,
        source=found.source,
        evaluation=found.evaluation,
        warnings=warnings,
        resume=resume,
        check_gpus=found.check_gpus,
        generated_tasks=tuple(each.task.name for each in rows.generated.values()),
    )


def _without_model(config: Config, rows: RunRows, device: Device) -> _Inputs:
    """Return what a dry run can say without the model."""
    unchecked = "prompt lengths" + (", -tp and -pp" if config.dp < config.parallel.num_trainers else "")
    return _Inputs(
        config=config,
        train=PromptSet(prompts=(), num_refused=0),
        evaluation={},
        num_prompts=rows.num_train,
        warnings=(
            f"model {config.model.model} is not on this machine: {unchecked} are not checked",
            *open_choices(config, device),
        ),
    )


def _with_model(
    config: Config,
    rows: RunRows,
    directory: Path,
    device: Device,
    *,
    given: Collection[str],
    environment: EnvironmentFacts,
    check_layout: Callable[..., None],
    try_model: TryModel,
    is_dry_run: bool,
) -> _Inputs:
    """Tokenise the rows, and check what depends on the model in `directory`. Raises: ConfigError."""
    config = config.with_changes(model=str(directory))
    hf_config = read_model_config(directory)
    check_length(config, hf_config)
    check_width(config, hf_config)
    config, chosen = with_run_choices(config, hf_config, device, given=given, check_layout=check_layout)
    check_layout(config, hf_config)
    uses: tuple[Use, ...] = ("trained",) if config.sampling.backend == "fake" else ("trained", "sampled")
    precision = resolve_precision(config, device)
    check_reference(config, precision)
    hf_config, of_files = checked_model_config(directory, *uses, precision=precision, is_dry_run=is_dry_run)
    config, tokenizer, of_models = with_run_models(
        config,
        directory,
        hf_config,
        check_layout=check_layout,
        try_model=try_model,
        is_dry_run=is_dry_run,
    )
    config = with_sync_timeout(config, update_bytes(config, hf_config, device))
    environment.check_tokenizer(tokenizer)
    train, evaluation = make_run_prompts(rows, config, tokenizer)
    check_of_run(config, rows, tokenizer)
    check_prompts(config, train if rows.of_files else None, evaluation)
    check_token_ids(train if rows.of_files else None, evaluation, hf_config, config.model.model)
    check_memory = partial(
        check_run_memory, config, hf_config, device, prompt_tokens=_mean_prompt_tokens(train), check_layout=check_layout
    )
    memory, of_memory = check_memory()
    return _Inputs(
        config=config,
        train=train,
        evaluation=evaluation,
        num_prompts=None if rows.generated else len(train.prompts),
        source=make_source(rows, config, tokenizer, train),
        memory=(*chosen, *memory),
        check_gpus=lambda gpu_bytes: check_memory(gpu_memory=gpu_bytes),
        warnings=(*of_files, *of_models, *of_memory),
    )


def _mean_prompt_tokens(train: PromptSet) -> float | None:
    """Return the mean length of the first prompts of files, in tokens; None if there are none."""
    read = train.prompts[:NUM_READ]
    return sum(len(prompt.token_ids) for prompt in read) / len(read) if read else None


def _warnings(config: Config, device: Device) -> list[str]:
    """Return the warnings of all subjects. Raises: ConfigError if there is nothing to evaluate on."""
    subjects = (_evaluation_warnings, reward_warnings, algorithm_warnings, distillation_warnings, environment_warnings)
    warnings = [warning for warnings_of in subjects for warning in warnings_of(config)]
    return [*warnings, *engine_warnings(config), *sharding_warnings(config, device)]


def _evaluation_warnings(config: Config) -> Iterator[str]:
    """Yield warnings. Raises: ConfigError if there is nothing to evaluate on."""
    run = config.run
    if run.eval_interval > 0 and not config.data.eval_dataset:
        raise ConfigError(f"--eval-interval {run.eval_interval}: needs --eval-dataset, or -1 to switch it off")
    if config.data.eval_dataset and run.eval_interval < 0:
        yield "--eval-dataset is not evaluated: --eval-interval is -1 (off)"
