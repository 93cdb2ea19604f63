"""Prepare a job on a dataset from a checked config: find the model, make the samples, choose the device, make the plan.

Mistakes in files are reported here, before Ray starts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from coati_rl.checkpoint.dataset_resume import DatasetResume, open_dataset_resume
from coati_rl.checkpoint.former_settings import with_former_settings
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_plan import OfflinePlan, make_offline_plan
from coati_rl.config.offline_rules import with_offline_defaults
from coati_rl.config.plan import resolve_precision
from coati_rl.data.dataset_source import DatasetSettings, DatasetSource
from coati_rl.data.mixing import Mixing
from coati_rl.errors import ConfigError
from coati_rl.model_files.check import Use
from coati_rl.own_optimizer import check_own_functions
from coati_rl.preflight.adapter import with_adapter
from coati_rl.preflight.job_memory import check_job_memory
from coati_rl.preflight.job_models import with_dataset_models
from coati_rl.preflight.layout_choice import open_choices, with_job_choices
from coati_rl.preflight.offline_rows import (
    TRAIN_FLAG,
    SampleSet,
    SourceForms,
    load_forms,
    make_samples,
    needs_chat_template,
)
from coati_rl.preflight.prepared import PreparedJob
from coati_rl.preflight.resources import (
    checked_model_config,
    find_device,
    read_model_config,
    resolve_model,
    sharding_warnings,
)
from coati_rl.preflight.sample_rows import TryModel
from coati_rl.preflight.saved_tokenizer import check_of_dataset
from coati_rl.processes.exit_messages import print_lines
from coati_rl.processes.slow_phase import slow_phase
from coati_rl.samples import Sample
from coati_rl.types import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedDataset(PreparedJob):
    """Hold the inputs of a job on a dataset."""

    config: OfflineConfig
    plan: OfflinePlan
    train: Sequence[Sample]
    mixing: Mixing | None = None  # of the training rows' sources
    evaluation: dict[str, Sequence[Sample]]  # by the set's name
    resume: DatasetResume | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inputs:
    """Hold what a job trains on, as far as it is known."""

    config: OfflineConfig  # as the model asks for it
    sets: Mapping[str, SampleSet] = field(default_factory=dict)  # by flag; none without the model
    memory: tuple[str, ...] = ()  # lines of the plan, of the layout that was chosen and of memory
    check_gpus: Callable[[int], object] = lambda gpu_bytes: None  # see `PreparedJob`
    warnings: tuple[str, ...]


def prepare_offline(
    config: OfflineConfig,
    *,
    check_layout: Callable[..., None],
    try_model: TryModel,
    is_dry_run: bool,
) -> PreparedDataset:
    """Resolve device and model, read, validate and tokenise the rows, and plan.

    Args:
        config: checked by `offline_rules.check_offline`.
        check_layout: of the trainers; raises ConfigError if a model (its transformers config) cannot be cut as asked.
        try_model: of the trainers; tries whether a model computes packed samples apart.
        is_dry_run: plan for devices that this machine lacks, and do not fetch a model.
    Raises: ConfigError.
    """
    config, of_resume = with_former_settings(config)
    config = with_adapter(config)
    check_own_functions(config)
    device, warnings = find_device(
        config,
        needed=f"-t {config.parallel.num_trainers}: {config.num_devices} GPUs are needed",
        fewer=lambda available: f"use -t {available}" if available else "use --device cpu",
        is_dry_run=is_dry_run,
    )
    paths = {TRAIN_FLAG: config.data.dataset}
    paths |= {f"--eval-dataset {name}": path for name, path in (config.data.eval_dataset or {}).items()}
    say = partial(print_lines, prog=config.prog())
    with slow_phase("preparing, 1 of 3: the rows are read", say):
        forms = {flag: load_forms(config, path, flag=flag) for flag, path in paths.items()}
    _check_template(config, forms)
    warnings += [*sharding_warnings(config, device), *_without_effect(config)]
    with slow_phase("preparing, 2 of 3: the model's files are looked up", say):
        directory = resolve_model(config.model.model, is_dry_run=is_dry_run)
    if directory is None:
        unchecked = f"model {config.model.model} is not on this machine: lengths and the layout are not checked"
        warned = (unchecked, *open_choices(config, device))
        found = _Inputs(config=with_offline_defaults(config, device), warnings=warned)
    else:
        with slow_phase("preparing, 3 of 3: the model is checked and the rows are tokenised", say):
            found = _with_model(
                config,
                forms,
                directory,
                device,
                check_layout=check_layout,
                try_model=try_model,
                is_dry_run=is_dry_run,
            )
    return _planned(found, device, (*of_resume, *warnings, *found.warnings))


def _planned(found: _Inputs, device: Device, warnings: tuple[str, ...]) -> PreparedDataset:
    """Plan the job and open the checkpoint that it goes on from. Raises: ConfigError."""
    config = found.config
    evaluation = {flag.partition(" ")[2]: each for flag, each in found.sets.items() if flag != TRAIN_FLAG}
    train = found.sets.get(TRAIN_FLAG)
    plan = make_offline_plan(
        config,
        device=device,
        rows=None if train is None else train.counts,
        evaluation={name: each.counts for name, each in evaluation.items()},
    )
    plan = replace(plan, memory=found.memory)
    _check_step(config, plan)
    source = None if train is None else DatasetSource(train.samples, dataset_settings(config, train.mixing))
    resume = open_dataset_resume(config, source)
    if resume is not None:
        plan = replace(plan, num_steps=resume.num_steps)
    return PreparedDataset(
        config=config,
        plan=plan,
        train=() if train is None else train.samples,
        mixing=None if train is None else train.mixing,
        evaluation={name: each.samples for name, each in evaluation.items()},
        warnings=warnings,
        resume=resume,
        check_gpus=found.check_gpus,
    )


def _with_model(
    config: OfflineConfig,
    forms: Mapping[str, SourceForms],
    directory: Path,
    device: Device,
    *,
    check_layout: Callable[..., None],
    try_model: TryModel,
    is_dry_run: bool,
) -> _Inputs:
    """Tokenise the rows, and check what depends on the model in `directory`. Raises: ConfigError."""
    config = config.with_changes(model=str(directory))
    hf_config = read_model_config(directory)
    config, given = _within_positions(config, hf_config), config.parallel.model_fields_set
    config = with_offline_defaults(config, device)
    config, chosen = with_job_choices(config, hf_config, device, given=given, check_layout=check_layout)
    check_layout(config, hf_config)
    of_head: Use = "valued" if config.VALUES_TOKENS else "rated"
    uses: tuple[Use, ...] = ("trained", of_head) if config.HAS_SCALAR_HEAD else ("trained",)
    precision = resolve_precision(config, device)
    hf_config, of_files = checked_model_config(directory, *uses, precision=precision, is_dry_run=is_dry_run)
    config, tokenizer, of_models = with_dataset_models(
        config,
        directory,
        hf_config,
        needs_chat_template=any(needs_chat_template(rows) for rows in forms.values()),
        check_layout=check_layout,
        try_model=try_model,
        is_dry_run=is_dry_run,
    )
    sets = {flag: make_samples(config, rows, tokenizer, flag=flag) for flag, rows in forms.items()}
    _check_not_empty(config, sets)
    _check_token_ids(sets, hf_config.get_text_config().vocab_size)
    check_of_dataset(config, forms, tokenizer)
    check_memory = partial(
        check_job_memory, config, hf_config, device, samples=sets[TRAIN_FLAG].samples, check_layout=check_layout
    )
    memory, of_memory = check_memory()
    return _Inputs(
        config=config,
        sets=sets,
        memory=(*chosen, *memory),
        check_gpus=lambda gpu_bytes: check_memory(gpu_memory=gpu_bytes),
        warnings=(*of_files, *of_models, *of_memory),
    )


def dataset_settings(config: OfflineConfig, mixing: Mixing | None) -> DatasetSettings:
    """Return the sizes of a step, in samples; `mixing` of the training rows' sources."""
    parallel, run = config.parallel, config.run
    rows_at_a_time = min(parallel.train_microbatch_size, parallel.train_batch_size)
    return DatasetSettings(
        dp=config.dp,
        trainers_per_dp_rank=parallel.num_trainers // config.dp,
        batch_size=config.rows_per_step * config.UNIT,
        micro_batch_size=rows_at_a_time * config.UNIT,
        num_epochs=config.data.max_epochs,
        max_steps=config.data.max_steps,
        save_interval=run.save_interval if run.save_interval > 0 else None,
        max_tokens_per_microbatch=parallel.max_tokens_per_microbatch,
        one_sample_per_row=parallel.one_sample_per_row,
        shares_prefixes=config.shares_prefixes,
        unit=config.UNIT,
        denominator="units" if config.UNIT > 1 else "tokens",
        seed=run.seed,
        mixing=mixing,
    )


def _check_template(config: OfflineConfig, forms: Mapping[str, SourceForms]) -> None:
    """Raise ConfigError for --input-template beside rows of messages, which the chat template renders."""
    if config.data.input_template is None:
        return
    for flag, rows in forms.items():
        if needs_chat_template(rows):
            raise ConfigError(
                f"--input-template is for prompts that are text, and {flag} has rows of messages; leave it out, or use "
                "--chat-template"
            )


def _within_positions(config: OfflineConfig, hf_config: Any) -> OfflineConfig:
    """Lower the default of --max-length to the model's positions. Raises: ConfigError if one that was given exceeds."""
    limit = getattr(hf_config, "max_position_embeddings", None)
    rope = getattr(hf_config, "rope_parameters", None) or {}
    is_extended = rope.get("rope_type", "default") != "default"
    length = config.data.max_length
    if not isinstance(limit, int) or length <= limit or is_extended:
        return config
    if "max_length" in config.data.model_fields_set:
        raise ConfigError(
            f"--max-length {length} exceeds the {limit} positions of --model {config.model.model}; "
            f"use --max-length {limit}"
        )
    return config.with_changes(max_length=limit)


def _without_effect(config: OfflineConfig) -> Iterator[str]:
    """Return the flags of a reference model that the loss does not read, and of Ray where it is not started."""
    if config.cluster.ray_dir is not None and not config.needs_ray:
        yield "--ray_dir: has no effect, as a job on this machine starts no Ray"
    given = {"reference_model": "--reference-model", "precompute_reference": "--precompute-reference"}
    values = config.flat()
    for name, flag in given.items():
        if values.get(name) and not config.uses_reference:
            yield f"{flag}: has no effect, as {config.objective_text} needs no reference model"


def _check_not_empty(config: OfflineConfig, sets: dict[str, SampleSet]) -> None:
    for flag, each in sets.items():
        if not each.samples:
            counts = each.counts
            why = f"{counts.num_left_out} have nothing to train within --max-length {config.data.max_length}"
            why += f", of {counts.num_equal} pairs chosen equals rejected" if counts.num_equal else ""
            why += f", of {counts.num_undecided} the reward is undecided" if counts.num_undecided else ""
            raise ConfigError(f"{flag}: no row can be trained on: {why}")


def _check_token_ids(sets: Mapping[str, SampleSet], vocab_size: int) -> None:
    """Raise ConfigError for a token that the model has no embedding of; streamed samples are not read for it."""
    for flag, each in sets.items():
        for sample in each.samples if isinstance(each.samples, tuple) else ():
            largest = max(ids.max(initial=0) for ids in (sample.prefix_ids, sample.token_ids))
            if largest >= vocab_size:
                raise ConfigError(
                    f"{flag}: {sample.uid} (from 0) has the token {largest}, and --model is of {vocab_size} tokens; "
                    "use the model whose tokens they are"
                )


def _check_step(config: OfflineConfig, plan: OfflinePlan) -> None:
    if plan.num_steps == 0 and plan.rows is not None:
        usable = plan.rows.num_rows
        most = usable * config.data.max_epochs // config.dp
        remedy = f"-e {-(-config.rows_per_step // usable)}" + (f" or -tbs {most}" if most else "")
        raise ConfigError(
            f"--dataset {config.data.dataset}: {usable} usable rows x {config.data.max_epochs} epoch(s) do not fill "
            f"one optimizer step of tbs * dp = {config.rows_per_step} rows; nearest: {remedy}"
        )
