"""Make checked settings from a model, a loss and flags, as the commands do."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from coati_rl.config import Config
from coati_rl.config.cli import build_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.control_rules import check_reference
from coati_rl.config.plan import resolve_precision
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.preflight.adapter import with_adapter
from coati_rl.preflight.resources import checked_model_config, load_run_tokenizer, precision_warnings, resolve_model
from coati_rl.preflight.sample_rows import with_sample_rows
from coati_rl.types import Device

logger = logging.getLogger(__name__)

# Of an algorithm, but about groups of rollouts, which a loop of one's own makes itself.
_OF_ROLLOUTS = ("filter_truncated_response", "soft_over_length_punishment", "filter_range", "dynamic_batching")


def device_of(device: Literal["auto", "cpu", "cuda"]) -> Device:
    """Return the kind of device to compute on: GPUs if there are any, unless one is asked for."""
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def model_dir(model: str | Path) -> Path:
    """Return the directory of a model, which may be a hub id. Raises: ConfigError."""
    directory = resolve_model(str(model), is_dry_run=False)
    assert directory is not None  # noqa: S101, only a dry run goes without
    return directory


def tokenizer_of(config: TrainingConfig) -> Any:
    """Return the model's tokenizer, which may have no chat template."""
    return load_run_tokenizer(Path(config.model.model), config.data, needs_chat_template=False)


def trainer_config(model: str | Path, loss: Any, *, num_trainers: int, device: Device, **flags: Any) -> TrainingConfig:
    """Return the settings of a trainer whose model is proved, as before a run.

    Args:
        model: directory or hub id.
        loss: "sft", "rm", "dpo", "kto", "prm", "value" or an algorithm's name; anything else has its own settings.
        num_trainers: ranks.
        device: of the ranks.
        flags: of the command of that loss.
    Raises: ConfigError for a wrong setting, and for a model that cannot be trained right by these.
    """
    from consumer.parallel.layout_rules import check_layout
    from consumer.proofs.model import try_model

    values = {"num_trainers": num_trainers, **flags, "model": str(model_dir(model))}
    job: type[TrainingConfig] = OFFLINE.get(loss, Config) if isinstance(loss, str) else Config
    if job is Config:
        values |= {"algo": loss} if isinstance(loss, str) else {"kl_coeff": 0.0, "compute_all_samples": True}
    config = with_adapter(build_job(values, job))
    directory, precision = Path(config.model.model), resolve_precision(config, device)
    hf_config, of_model = checked_model_config(directory, "trained", precision=precision)
    check_layout(config, hf_config)
    if isinstance(config, Config):
        check_reference(config, precision)
    elif getattr(config, "precomputes_reference", False):
        raise ConfigError("precompute_reference=True: a trainer of the library sees its samples once; leave it out")
    config, of_rows = with_sample_rows(config, {"--model": str(directory)}, try_model=try_model)
    for warning in (*of_model, *of_rows, *precision_warnings(config, device), *_rollout_warnings(config)):
        logger.warning("%s", warning)
    return config


def _rollout_warnings(config: TrainingConfig) -> Iterator[str]:
    if isinstance(config, Config) and (on := [name for name in _OF_ROLLOUTS if getattr(config.algorithm, name)]):
        yield (
            f"{', '.join(on)}: without effect here, as the loop chooses its samples; leave out completions whose "
            'finish_reason is "length", and groups without a difference, if the algorithm does'
        )
