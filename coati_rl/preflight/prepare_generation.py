"""Prepare batch inference from a checked config: find model and device, read and tokenise the prompts.

Mistakes in files are reported here, before an engine is loaded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from coati_rl.config.engine_rules import check_engine_device, check_experts, sequences_at_a_time
from coati_rl.config.fields import role_of
from coati_rl.config.generate import GenerateConfig
from coati_rl.config.plan import resolve_precision
from coati_rl.config.reward_rules import reward_warnings
from coati_rl.coordinator.leases import LeaseTable, SamplingPlan
from coati_rl.errors import ConfigError
from coati_rl.model_files.check import Use
from coati_rl.preflight.prompts import RewardFacts, load_run_rows, make_run_prompts
from coati_rl.preflight.resources import checked_model_config, load_run_tokenizer, precision_warnings, resolve_model
from coati_rl.preflight.size_checks import check_length
from coati_rl.preflight.stop_texts import check_stop_texts
from coati_rl.reading.chat_template import now, set_variables, unread_warnings, writes_date
from coati_rl.reading.dataset import PromptSet
from coati_rl.types import CUTS, Device, Prompt, SamplingParams

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_NO_REWARDS = RewardFacts(default_system_prompt=lambda _: "", needs_ground_truth=lambda _: False)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedGeneration:
    """Hold the inputs of batch inference."""

    config: GenerateConfig
    model: Path
    prompts: PromptSet
    device: Device
    dtype: str  # of the engine
    warnings: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Return what decides the rows, as JSON: a command with other values does not go on in the same file."""
        config, fields = self.config, self.config.fields()
        given = {name: value for name, value in config.flat("json").items() if role_of(fields[name]) == "experiment"}
        del given["dataset"]  # its prompts count
        known = {"model": str(self.model), "model_files": _files_digest(self.model), "dtype": self.dtype}
        return given | known | {"prompts": _prompts_digest(self.prompts.prompts)}

    @property
    def output(self) -> Path:
        """Return the path of the rows."""
        return Path(self.config.output.output or "").expanduser().absolute()

    def leases(self) -> LeaseTable:
        """Return the table that gives each prompt its sampling and its seed."""
        run, sampling = self.config.as_run(), self.config.sampling

        def params(settings: Any) -> SamplingParams:
            return SamplingParams(
                temperature=settings.temperature,
                **{name: getattr(settings, name) for name in CUTS},
                repetition_penalty=sampling.repetition_penalty,
                max_new_tokens=settings.max_new_tokens,
                stop=tuple(settings.stop),
            )

        of_tasks = {name: params(each.sampling) for name, each in run.by_task.items()}
        plan = SamplingPlan(group_size=sampling.num_generations, sampling=params(sampling), of_tasks=of_tasks)
        return LeaseTable({"train": plan}, seed=sampling.seed)

    def lines(self) -> list[str]:
        """Return the plan, for --dry-run."""
        config = self.config
        numbers = {
            "prompts": len(self.prompts.prompts),
            "samples": len(self.prompts.prompts) * config.sampling.num_generations,
            "in flight": config.max_sequences,
            "engine": f"{config.sampling.backend} ({self.device}, {self.dtype})",
            "rewards": config.reward.reward_type,
            "output": config.output.output,
        }
        return [f"{name:<24}{value}" for name, value in numbers.items()]


def prepare_generation(
    config: GenerateConfig, *, rewards: RewardFacts, earlier: Mapping[str, Any] | None = None
) -> PreparedGeneration:
    """Resolve the device and the model, read, validate and tokenise the prompts.

    Args:
        config: checked by `check_generate`.
        rewards: what they ask of rows.
        earlier: settings of the command that wrote the output's first rows, whose date chat templates go on to write.
    Raises: ConfigError.
    """
    run = config.as_run()
    device = engine_device(config.engine.device, width=config.engine.producer_tensor_parallel_size)
    check_engine_device(run.sampling, device, max_model_len=run.max_model_len, max_num_seqs=sequences_at_a_time(run))
    rows = load_run_rows(run, rewards if config.is_scored else _NO_REWARDS)
    model = resolve_model(config.model.model, is_dry_run=False)
    if model is None:
        raise AssertionError("a model is None in a dry run only")
    uses: tuple[Use, ...] = () if config.sampling.backend == "fake" else ("sampled",)
    hf_config, of_files = checked_model_config(model, *uses, precision=resolve_precision(run, device))
    check_length(run, hf_config)
    check_experts(hf_config, device, backend=run.sampling.backend)
    data = config.data
    tokenizer = load_run_tokenizer(model, data, needs_chat_template=data.input_template is None)
    check_stop_texts(run, tokenizer, model)
    if writes_date(tokenizer):
        date = data.template_date or (earlier or {}).get("template_date") or now()
        config = config.with_changes(template_date=date)
        set_variables(tokenizer, date=date, variables=data.chat_template_kwargs)
    prompts, _ = make_run_prompts(rows, run, tokenizer)
    if not prompts.prompts:
        raise ConfigError(
            f"--dataset: all {prompts.num_refused} prompts exceed --max-prompt-tokens {config.data.max_prompt_tokens}"
        )
    of_template = unread_warnings(tokenizer, data.chat_template_kwargs)
    of_rewards = reward_warnings(run) if config.is_scored else ()
    warnings = [*of_files, *of_template, *of_rewards, *precision_warnings(run, device)]
    if prompts.num_refused:
        limit = config.data.max_prompt_tokens
        warnings.append(f"--dataset: {prompts.num_refused} prompts exceed --max-prompt-tokens {limit}: left out")
    precision = resolve_precision(run, device)
    return PreparedGeneration(
        config=config,
        model=model,
        prompts=prompts,
        device=device,
        dtype=_DTYPES[precision],
        warnings=tuple(warnings),
    )


def engine_device(chosen: Literal["auto", "cpu", "cuda"], *, width: int) -> Device:
    """Return the device of --device for an engine of `width` processes.

    Raises: ConfigError where this machine has too few GPUs.
    """
    if chosen == "cpu":
        return "cpu"
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen == "auto" and not available:
        return "cpu"
    if available < width:
        remedy = f"use -ptp {available}" if available else "use --device cpu"
        raise ConfigError(f"-ptp {width}: {width} GPUs are needed, this machine has {available}; {remedy}")
    return "cuda"


def _files_digest(model: Path) -> str:
    """Return a digest of the names, sizes and times of the model's files: a checkpoint may have been replaced."""
    stats = {path.name: path.stat() for path in sorted(model.iterdir()) if path.is_file()}
    seen = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
    return str(xxhash.xxh3_64_hexdigest(json.dumps(seen).encode()))


def _prompts_digest(prompts: Sequence[Prompt]) -> str:
    hasher = xxhash.xxh3_64()
    for prompt in prompts:
        hasher.update(json.dumps([prompt.uid, prompt.token_ids, prompt.ground_truth, prompt.task]).encode())
    return str(hasher.hexdigest())
