"""Check the memory of runs with producers and of jobs on datasets: their models, and the size of a micro-batch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from coati_rl.config import Config
from coati_rl.config.engine_rules import check_width
from coati_rl.config.held_models import frozen_models, keeps_old_policy
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_rules import check_offline
from coati_rl.config.plan import resolve_precision
from coati_rl.config.rules import check
from coati_rl.config.server_rules import stages_on_host
from coati_rl.memory.forecast import Forecast
from coati_rl.memory.model_shape import model_shape
from coati_rl.memory.run_engines import engine_memory
from coati_rl.memory.run_memory import (
    Machine,
    RunModels,
    offline_micro_batch,
    reward_model_memory,
    rl_micro_batch,
    run_forecast,
    scorer_memory,
    trainer_memory,
)
from coati_rl.memory.updates import shared_update, update_size
from coati_rl.preflight.memory_check import MemoryCheck, host_memory, passes
from coati_rl.preflight.resources import read_model_config
from coati_rl.samples import Sample
from coati_rl.transport.choice import choose_backend
from coati_rl.transport.rendezvous import CollectiveBackend
from coati_rl.types import Device

OfflineJobConfig = TypeVar("OfflineJobConfig", bound=OfflineConfig)

_NUM_READ = 2000  # samples, for their lengths
Found = tuple[tuple[str, ...], list[str]]  # lines of the plan, and warnings


def check_memory(check: MemoryCheck[Any]) -> Found:
    """Return lines of the plan, and warnings; a warning alone for an architecture that transformers cannot build.

    Raises: ConfigError if the job cannot fit.
    """
    for hf_config in check.models:
        if not is_buildable(hf_config):
            return (), [f"the memory of the run is not forecast, as a model's architecture is {hf_config.model_type}"]
    forecast, warnings = check.run()
    return (*_of_experts(check.models[0]), *forecast.lines()), warnings


def run_check(
    config: Config,
    hf_config: Any,
    machine: Machine,
    *,
    prompt_tokens: float | None,
    check_layout: Callable[..., None],
) -> MemoryCheck[Config]:
    """Return the check of a run with producers.

    Args:
        config: of the run, its models as directories.
        hf_config: transformers config of the policy.
        machine: of the run.
        prompt_tokens: of a prompt, the mean; None if unknown.
        check_layout: as of `Preparation`.
    """
    models = RunModels(
        policy=hf_config,
        frozen=_frozen_of_run(config, hf_config),
        critic=_critic_of_run(config, hf_config),
        adapter_copies=int(config.lora.is_on and keeps_old_policy(config)),
    )
    of_rewards = _reward_model_configs(config)

    def forecast(changed: Config, *, prompt: int, response: int) -> Forecast:
        size, several = rl_micro_batch(changed, prompt_tokens=prompt, response_tokens=response)
        trainer = trainer_memory(
            changed,
            models,
            size,
            machine,
            has_several_micro_batches=several,
            kept_versions=changed.num_kept_versions,
            backend=(backend := backend_of(changed, hf_config, machine.device)),
        )
        engine = engine_memory(changed, hf_config, machine, backend, sequence_tokens=prompt + response)
        reward_models = reward_model_memory(changed, machine, of_rewards)
        update = update_size(changed, hf_config, resolve_precision(changed, machine.device))
        scorers = scorer_memory(changed, models, size, machine)
        return run_forecast(
            changed, machine, [trainer, engine, *scorers, *reward_models], shared=shared_update(update, backend)
        )

    least = int(prompt_tokens or 1)
    return MemoryCheck(
        config=config,
        forecast=lambda each: forecast(
            each, prompt=each.data.max_prompt_tokens, response=each.max_model_len - each.data.max_prompt_tokens
        ),
        sure=lambda each: forecast(each, prompt=least, response=1),
        is_valid=passes(check, lambda each: check_layout(each, hf_config), lambda each: check_width(each, hf_config)),
        machine=machine,
        host_available=host_memory(config, machine.device),
        models=(hf_config, *models.frozen.values(), *of_rewards.values()),
    )


def _reward_model_configs(config: Config) -> dict[str, Any]:
    return {each: read_model_config(Path(each)) for each in config.reward_models.names if _is_here(each)}


def job_check(
    config: OfflineJobConfig,
    hf_config: Any,
    machine: Machine,
    *,
    samples: Sequence[Sample],
    check_layout: Callable[..., None],
) -> MemoryCheck[OfflineJobConfig]:
    """Return the check of a job on a dataset; see `run_check`. `samples` are those that it trains on."""
    lengths = [len(sample) for sample in samples[:_NUM_READ]]
    longest = max(lengths) if lengths and len(lengths) == len(samples) else config.max_sample_tokens
    mean = sum(lengths) // len(lengths) if lengths else 1

    def forecast(changed: OfflineJobConfig, tokens: int) -> Forecast:
        unit, parallel = changed.UNIT, changed.parallel
        size, several = offline_micro_batch(
            changed,
            samples_at_a_time=parallel.train_microbatch_size * unit,
            samples_per_step=parallel.train_batch_size * unit,
            tokens=tokens,
            unit=unit,
        )
        models = _models_of_job(changed, hf_config)
        trainer = trainer_memory(changed, models, size, machine, has_several_micro_batches=several)
        return run_forecast(changed, machine, [trainer, *scorer_memory(changed, models, size, machine)])

    return MemoryCheck(
        config=config,
        forecast=lambda each: forecast(each, longest),
        sure=lambda each: forecast(each, mean),
        is_valid=passes(check_offline, lambda each: check_layout(each, hf_config)),
        machine=machine,
        host_available=host_memory(config, machine.device),
        models=(hf_config, *_models_of_job(config, hf_config).frozen.values()),
    )


def _models_of_job(config: OfflineConfig, hf_config: Any) -> RunModels:
    """Return the models that a trainer holds; a reference that is computed first is freed before the first step."""
    paths = {"reference": config.reference_model, "teacher": config.teacher or ""}
    held = frozen_models(config) - ({"reference"} if config.precomputes_reference else set())
    return RunModels(
        policy=hf_config,
        frozen={role: _config_of(paths[role], config, hf_config) for role in sorted(held) if _is_here(paths[role])},
        has_scalar_head=config.HAS_SCALAR_HEAD,
    )


def update_bytes(config: Config, hf_config: Any, device: Device) -> int:
    """Return the bytes of a weight update; 0 for an architecture that transformers cannot build."""
    if not is_buildable(hf_config):
        return 0
    return update_size(config, hf_config, resolve_precision(config, device)).total


def is_buildable(hf_config: Any) -> bool:
    """Whether transformers can build the architecture, so that its parameters are counted."""
    try:
        model_shape(hf_config)
    except (ValueError, TypeError, AttributeError):  # also fields that other architectures lack
        return False
    return True


def _of_experts(hf_config: Any) -> tuple[str, ...]:
    """Return a line of the plan with the parameters of a mixture of experts; none of a dense model."""
    shape = model_shape(hf_config)
    if shape.active_weights == shape.num_weights:
        return ()
    return (f"{'parameters':<24}{shape.num_weights:,}, of which a token passes {shape.active_weights:,}",)


def backend_of(config: Config, hf_config: Any, device: Device) -> CollectiveBackend:
    """Return the backend that the trainers will choose for an update of this size."""
    return choose_backend(
        config.sync.weight_transport,
        device=device,
        is_one_node=not config.cluster.master_address,
        update_bytes=update_bytes(config, hf_config, device),
        in_turns=stages_on_host(config),
    )


def _frozen_of_run(config: Config, hf_config: Any) -> dict[str, Any]:
    """Return the configs of reference, policy before the update, and teacher, where a run has them."""
    own = {role: hf_config for role in ("reference", "old") if role in frozen_models(config)}
    teacher = config.distillation.teacher
    has_teacher = teacher is not None and _is_here(teacher)
    return own | ({"teacher": _config_of(str(teacher), config, hf_config)} if has_teacher else {})


def _critic_of_run(config: Config, hf_config: Any) -> Any:
    """Return the config of the critic, None without one."""
    if not config.algorithm.has_critic:
        return None
    start = config.critic.critic_model
    return hf_config if start is None or not _is_here(start) else _config_of(start, config, hf_config)


def _is_here(model: str) -> bool:
    return Path(model).is_dir()


def _config_of(model: str, config: Config | OfflineConfig, hf_config: Any) -> Any:
    return hf_config if model == config.model.model else read_model_config(Path(model))
