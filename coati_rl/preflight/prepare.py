"""Prepare runs with producers: their prompts, engines, rewards and models."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coati_rl.build import build_loss
from coati_rl.checkpoint.resume import ResumePoint, open_resume_point
from coati_rl.config import Config
from coati_rl.config.algorithm_rules import algorithm_warnings
from coati_rl.config.control_rules import check_reference
from coati_rl.config.distillation_rules import distillation_warnings
from coati_rl.config.engine_rules import check_engines, check_experts, check_width, engine_warnings
from coati_rl.config.environment_rules import environment_warnings
from coati_rl.config.plan import Plan, make_plan, resolve_precision
from coati_rl.config.reward_rules import reward_warnings
from coati_rl.config.server_rules import stages_on_host
from coati_rl.config.update_rules import with_sync_timeout
from coati_rl.estimator import load_estimator
from coati_rl.memory.run_memory import Machine
from coati_rl.model_files.check import Use
from coati_rl.preflight.job_memory import run_check, update_bytes
from coati_rl.preflight.memory_check import MemoryCheck
from coati_rl.preflight.other_models import OtherModel
from coati_rl.preflight.preparation import Found, Preparation
from coati_rl.preflight.prepared_run import NUM_READ, Prepared
from coati_rl.preflight.prompts import (
    EnvironmentFacts,
    RewardFacts,
    RunRows,
    load_run_rows,
    make_run_prompts,
    make_source,
)
from coati_rl.preflight.same_tokens import check_token_ids
from coati_rl.preflight.saved_tokenizer import Encoded, some_rows
from coati_rl.preflight.size_checks import check_length, check_prompts, check_step, resolve_device
from coati_rl.preflight.stop_texts import check_stop_texts
from coati_rl.reading.dataset import PromptSet, render_prompts
from coati_rl.reading.prompt_source import PromptSource
from coati_rl.transport.choice import choose_backend
from coati_rl.types import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInputs:
    """Hold the prompts of a run."""

    train: PromptSet  # of files
    evaluation: dict[str, PromptSet]
    num_prompts: int | None  # of a pass; None: without end
    source: PromptSource | None = None


@dataclass(frozen=True, kw_only=True)
class RunPreparation(Preparation[Config, RunRows, RunInputs, Prepared]):
    """Prepare runs with producers."""

    rewards: RewardFacts  # what they ask of rows
    environment: EnvironmentFacts = field(default_factory=EnvironmentFacts)  # what it asks of prompts

    def check_functions(self, config: Config) -> None:
        """Try a user's own functions: estimator, loss, optimizer. Raises: ConfigError."""
        load_estimator(config.algorithm.advantage_estimator)
        build_loss(config.algorithm)
        super().check_functions(config)

    def find_device(self, config: Config) -> tuple[Device, list[str]]:
        """Return the device, on which engines and weight syncs can work, and warnings. Raises: ConfigError."""
        device, warnings = resolve_device(config, is_dry_run=self.is_dry_run)
        check_engines(config, device)
        is_one_node, in_turns = not config.cluster.master_address, stages_on_host(config)
        choose_backend(config.sync.weight_transport, device=device, is_one_node=is_one_node, in_turns=in_turns)
        return device, warnings

    def read_rows(self, config: Config) -> RunRows:
        return load_run_rows(config, self.rewards, tools=self.environment.tools)

    def warnings(self, config: Config, rows: RunRows) -> Iterator[str]:
        subjects = (
            *(_evaluation_warnings, reward_warnings, algorithm_warnings, distillation_warnings),
            *(environment_warnings, engine_warnings),
        )
        for warnings_of in subjects:
            yield from warnings_of(config)

    def unchecked(self, config: Config) -> str:
        return "prompt lengths" + (", -tp and -pp" if config.dp < config.parallel.num_trainers else "")

    def without_tokens(self, rows: RunRows) -> RunInputs:
        return RunInputs(train=PromptSet(prompts=(), num_refused=0), evaluation={}, num_prompts=rows.num_train)

    def within_positions(self, config: Config, hf_config: Any) -> Config:
        """Check the longest episode, and the ranks of engines."""
        check_length(config, hf_config)
        check_width(config, hf_config)
        return config

    def uses(self, config: Config) -> tuple[Use, ...]:
        """Return that the policy is trained, and sampled from by engines that read its files."""
        return ("trained",) if config.sampling.backend == "fake" else ("trained", "sampled")

    def needs_chat_template(self, config: Config, rows: RunRows) -> bool:
        return config.data.input_template is None

    def other_models(self, config: Config) -> Iterator[OtherModel]:
        distillation = config.distillation
        if distillation.teacher is not None:
            without_full = "use --distill-kl token" if distillation.distill_kl == "full" else None
            yield OtherModel(flag="--teacher", field="teacher", name=distillation.teacher, without_full=without_full)
        if config.algorithm.has_critic:
            start = config.critic.critic_model or config.model.model
            yield OtherModel(flag="--critic-model", field="critic_model", name=start, use="valued")

    def completed(self, config: Config, hf_config: Any, device: Device) -> Config:
        """Give syncs time for the model's size; refuse a reference that cannot move, and experts that vLLM lacks."""
        adapters = "--lora-sync adapter" if config.lora.lora_sync == "adapter" else None
        check_experts(hf_config, device, backend=config.sampling.backend, adapters=adapters)
        check_reference(config, resolve_precision(config, device))
        return with_sync_timeout(config, update_bytes(config, hf_config, device))

    def make_inputs(self, config: Config, rows: RunRows, tokenizer: Any, hf_config: Any) -> RunInputs:
        self.environment.check_tokenizer(tokenizer)
        check_stop_texts(config, tokenizer, Path(config.model.model))
        train, evaluation = make_run_prompts(rows, config, tokenizer)
        sets = {"--dataset": train} if rows.of_files else {}
        sets |= {f"--eval-dataset {name}": each for name, each in evaluation.items()}
        check_prompts(config, sets)
        for flag, each in sets.items():  # of streamed prompts the first ones are read
            largest = ((prompt.uid, max(prompt.token_ids, default=0)) for prompt in each.prompts[:NUM_READ])
            check_token_ids(flag, largest, hf_config.vocab_size, config.model.model)
        return RunInputs(
            train=train,
            evaluation=evaluation,
            num_prompts=None if rows.generated else len(train.prompts),
            source=make_source(rows, config, tokenizer, train),
        )

    def encoded(self, config: Config, rows: RunRows, tokenizer: Any) -> Iterator[Encoded]:
        return encoded_prompts(config, rows, tokenizer)

    def memory_check(
        self, config: Config, hf_config: Any, machine: Machine, inputs: RunInputs | None
    ) -> MemoryCheck[Config]:
        prompt_tokens = None if inputs is None else _mean_prompt_tokens(inputs.train)
        return run_check(config, hf_config, machine, prompt_tokens=prompt_tokens, check_layout=self.check_layout)

    def plan(self, found: Found[Config, RunInputs], device: Device) -> Plan:
        config, inputs = found.config, found.inputs
        plan = make_plan(
            config,
            num_prompts=inputs.num_prompts,
            device=device,
            prompt_tokens=_mean_prompt_tokens(inputs.train),
            memory=found.memory,
        )
        check_step(config, plan, inputs.num_prompts)
        return plan

    def open_resume(self, found: Found[Config, RunInputs]) -> ResumePoint | None:
        return open_resume_point(found.config, found.inputs.source, num_prompts=found.inputs.num_prompts)

    def prepared(self, found: Found[Config, RunInputs], rows: RunRows, **common: Any) -> Prepared:
        return Prepared(
            train=found.inputs.train,
            source=found.inputs.source,
            evaluation=found.inputs.evaluation,
            generated_tasks=tuple(each.task.name for each in rows.generated.values()),
            **common,
        )


def encoded_prompts(config: Config, rows: RunRows, tokenizer: Any) -> Iterator[Encoded]:
    """Yield some prompts of all files as a tokenizer encodes them."""
    for name, each in (*rows.of_files.items(), *rows.evaluation.items()):
        sample = some_rows(each)
        prompts = render_prompts(list(sample.values()), tokenizer, name=name, input_template=config.data.input_template)
        for number, prompt in zip(sample, prompts, strict=True):
            yield f"{name}, prompt {number + 1}", [np.array(prompt.token_ids)]


def _mean_prompt_tokens(train: PromptSet) -> float | None:
    """Return the mean length of the first prompts of files, in tokens; None if there are none."""
    read = train.prompts[:NUM_READ]
    return sum(len(prompt.token_ids) for prompt in read) / len(read) if read else None


def _evaluation_warnings(config: Config) -> Iterator[str]:
    if config.data.eval_dataset and config.run.eval_interval < 0:
        yield "--eval-dataset is not evaluated: --eval-interval is -1 (off)"
