"""Prepare jobs on datasets: their samples, and the models that score them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from coati_rl.batching.dataset_source import DatasetSettings, DatasetSource
from coati_rl.checkpoint.dataset_resume import DatasetResume, open_dataset_resume
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_plan import OfflinePlan, make_offline_plan
from coati_rl.errors import ConfigError
from coati_rl.memory.run_memory import Machine
from coati_rl.model_files.check import Use
from coati_rl.preflight.job_memory import job_check
from coati_rl.preflight.memory_check import MemoryCheck
from coati_rl.preflight.offline_rows import (
    TRAIN_FLAG,
    SampleSet,
    SourceForms,
    load_forms,
    make_samples,
    needs_chat_template,
    tokens_of,
)
from coati_rl.preflight.other_models import OtherModel
from coati_rl.preflight.preparation import Found, Preparation
from coati_rl.preflight.prepared import PreparedJob
from coati_rl.preflight.resources import find_device, positions_of
from coati_rl.preflight.same_tokens import check_token_ids
from coati_rl.preflight.saved_tokenizer import Encoded, some_rows
from coati_rl.reading.mixing import Mixing
from coati_rl.samples import Sample
from coati_rl.types import Device

_Forms = Mapping[str, SourceForms]  # by flag
_Sets = Mapping[str, SampleSet]  # by flag; none without the model


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedDataset(PreparedJob):
    """Hold the inputs of a job on a dataset."""

    config: OfflineConfig
    plan: OfflinePlan
    train: Sequence[Sample]
    mixing: Mixing | None = None  # of the training rows' sources
    evaluation: dict[str, Sequence[Sample]]  # by the set's name
    resume: DatasetResume | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetPreparation(Preparation[OfflineConfig, _Forms, _Sets, PreparedDataset]):
    """Prepare jobs on datasets."""

    def find_device(self, config: OfflineConfig) -> tuple[Device, list[str]]:
        """Return the device, and warnings. Raises: ConfigError when this machine has too few GPUs."""
        return find_device(
            config,
            needed=f"-t {config.parallel.num_trainers}: {config.num_devices} GPUs are needed",
            fewer=partial(_fewer, config),
            is_dry_run=self.is_dry_run,
        )

    def read_rows(self, config: OfflineConfig) -> _Forms:
        paths = {TRAIN_FLAG: config.data.dataset}
        paths |= {f"--eval-dataset {name}": path for name, path in (config.data.eval_dataset or {}).items()}
        return {flag: load_forms(config, path, flag=flag) for flag, path in paths.items()}

    def warnings(self, config: OfflineConfig, rows: _Forms) -> Iterator[str]:
        """Yield the flags without effect. Raises: ConfigError for a template that rows of messages do not go with."""
        _check_template(config, rows)
        return without_effect(config)

    def unchecked(self, config: OfflineConfig) -> str:
        return "lengths and the layout"

    def without_tokens(self, rows: _Forms) -> _Sets:
        return {}

    def within_positions(self, config: OfflineConfig, hf_config: Any) -> OfflineConfig:
        """Lower the default of --max-length to the model's positions. Raises: ConfigError for a larger one."""
        limit, length = positions_of(hf_config), config.data.max_length
        if limit is None or length <= limit:
            return config
        if "max_length" in config.data.model_fields_set:
            raise ConfigError(
                f"--max-length {length} exceeds the {limit} positions of --model {config.model.model}; "
                f"use --max-length {limit}"
            )
        return config.with_changes(max_length=limit)

    def uses(self, config: OfflineConfig) -> tuple[Use, ...]:
        """Return that the model is trained, and what reads a scalar head."""
        of_head: Use = "valued" if config.VALUES_TOKENS else "rated"
        return ("trained", of_head) if config.HAS_SCALAR_HEAD else ("trained",)

    def needs_chat_template(self, config: OfflineConfig, rows: _Forms) -> bool:
        return any(needs_chat_template(forms) for forms in rows.values())

    def other_models(self, config: OfflineConfig) -> Iterator[OtherModel]:
        """Yield the reference model, if it is another one, and the teacher."""
        if config.uses_reference and config.reference_model != config.model.model:
            yield OtherModel(flag="--reference-model", field="reference_model", name=config.reference_model)
        if config.teacher is not None:
            without_full = "leave --teacher out"
            yield OtherModel(flag="--teacher", field="teacher", name=config.teacher, without_full=without_full)

    def make_inputs(self, config: OfflineConfig, rows: _Forms, tokenizer: Any, hf_config: Any) -> _Sets:
        sets = {flag: make_samples(config, forms, tokenizer, flag=flag) for flag, forms in rows.items()}
        _check_not_empty(config, sets)
        for flag, each in sets.items():  # streamed samples are not read for it
            samples = each.samples if isinstance(each.samples, tuple) else ()
            ids = ((it.uid, np.append(it.prefix_ids, it.token_ids)) for it in samples)
            largest = ((f"{uid} (from 0)", int(each_ids.max(initial=0))) for uid, each_ids in ids)
            check_token_ids(flag, largest, hf_config.vocab_size, config.model.model)
        return sets

    def encoded(self, config: OfflineConfig, rows: _Forms, tokenizer: Any) -> Iterator[Encoded]:
        for forms in rows.values():
            for source in forms.streamed or (forms.forms,):
                for form in some_rows(source).values():
                    yield form.where, tokens_of(config, form, tokenizer)

    def memory_check(
        self, config: OfflineConfig, hf_config: Any, machine: Machine, inputs: _Sets | None
    ) -> MemoryCheck[OfflineConfig]:
        samples = () if inputs is None else inputs[TRAIN_FLAG].samples
        return job_check(config, hf_config, machine, samples=samples, check_layout=self.check_layout)

    def plan(self, found: Found[OfflineConfig, _Sets], device: Device) -> OfflinePlan:
        train = found.inputs.get(TRAIN_FLAG)
        plan = make_offline_plan(
            found.config,
            device=device,
            rows=None if train is None else train.counts,
            evaluation={name: each.counts for name, each in _evaluation(found.inputs).items()},
            memory=found.memory,
        )
        _check_step(found.config, plan)
        return plan

    def open_resume(self, found: Found[OfflineConfig, _Sets]) -> DatasetResume | None:
        config, train = found.config, found.inputs.get(TRAIN_FLAG)
        source = None if train is None else DatasetSource(train.samples, dataset_settings(config, train.mixing))
        return open_dataset_resume(config, source)

    def prepared(self, found: Found[OfflineConfig, _Sets], rows: _Forms, **common: Any) -> PreparedDataset:
        train = found.inputs.get(TRAIN_FLAG)
        return PreparedDataset(
            train=() if train is None else train.samples,
            mixing=None if train is None else train.mixing,
            evaluation={name: each.samples for name, each in _evaluation(found.inputs).items()},
            **common,
        )


def _fewer(config: OfflineConfig, available: int) -> str:
    """Return what to give in place of a job's settings where so many GPUs are available."""
    parallel, split = config.parallel, config.parallel.ranks_per_group
    for others in dict.fromkeys((parallel.ref_devices, 0)):
        if trainers := min(parallel.num_trainers, max(0, available - others)) // split * split:
            return f"use -t {trainers}" + ("" if others == parallel.ref_devices else " --ref-devices 0")
    return f"use {'fewer of -tp, -pp and --context-parallel, or ' if split > 1 else ''}--device cpu"


def _evaluation(sets: _Sets) -> dict[str, SampleSet]:
    """Return the evaluation sets by name."""
    return {flag.partition(" ")[2]: each for flag, each in sets.items() if flag != TRAIN_FLAG}


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


def _check_template(config: OfflineConfig, forms: _Forms) -> None:
    """Raise ConfigError for --input-template beside rows of messages, which the chat template renders."""
    if config.data.input_template is None:
        return
    for flag, rows in forms.items():
        if needs_chat_template(rows):
            raise ConfigError(
                f"--input-template is for prompts that are text, and {flag} has rows of messages; leave it out, or use "
                "--chat-template"
            )


def without_effect(config: OfflineConfig) -> Iterator[str]:
    """Return the flags of a reference model that the loss does not read, and of Ray where it is not started."""
    if config.cluster.ray_dir is not None and not config.needs_ray:
        yield "--ray_dir: has no effect, as a job on this machine starts no Ray"
    given = {"reference_model": "--reference-model", "precompute_reference": "--precompute-reference"}
    values = config.flat()
    for name, flag in given.items():
        if values.get(name) and not config.uses_reference:
            yield f"{flag}: has no effect, as {config.objective_text} needs no reference model"


def _check_not_empty(config: OfflineConfig, sets: _Sets) -> None:
    for flag, each in sets.items():
        if not each.samples:
            counts = each.counts
            why = f"{counts.num_left_out} have nothing to train within --max-length {config.data.max_length}"
            why += f", of {counts.num_equal} pairs chosen equals rejected" if counts.num_equal else ""
            why += f", of {counts.num_undecided} the reward is undecided" if counts.num_undecided else ""
            raise ConfigError(f"{flag}: no row can be trained on: {why}")


def _check_step(config: OfflineConfig, plan: OfflinePlan) -> None:
    if plan.num_steps == 0 and plan.rows is not None:
        usable = plan.rows.num_rows
        most = usable * config.data.max_epochs // config.dp
        remedy = f"-e {-(-config.rows_per_step // usable)}" + (f" or -tbs {most}" if most else "")
        raise ConfigError(
            f"--dataset {config.data.dataset}: {usable} usable rows x {config.data.max_epochs} epoch(s) do not fill "
            f"one optimizer step of tbs * dp = {config.rows_per_step} rows; nearest: {remedy}"
        )
