"""Read the configuration that a run has resolved, of whichever command it is."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from coati_rl.config.cli import build_job
from coati_rl.config.commands import TRAINING
from coati_rl.config.plan import resolve_precision
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.run_reader.run_directory import RunDirectory


def config_of(run: RunDirectory, step: int) -> TrainingConfig:
    """Return what a step was trained with. Raises: ConfigError if it is of another version, or of none of the jobs."""
    values = run.config(step)
    kinds = sorted(TRAINING.values(), key=lambda kind: len({*values} ^ {*kind.fields()}))
    if unknown := sorted({*values} - {*kinds[0].fields()}):
        names = ", ".join(unknown[:3])
        raise ConfigError(f"{run.path}: the settings of step {step} have {names}, which this version does not know")
    return build_job(values, kinds[0])


def precision_of(run: RunDirectory, config: TrainingConfig) -> torch.dtype:
    """Return what the run's trainers compute in: its checkpoints hold float32 masters of bfloat16 weights alone.

    Without a checkpoint it is what the configuration asks for on a CPU.
    """
    for checkpoint in run.checkpoints():
        kinds = {key.partition("/")[0] for key in _keys(checkpoint) if "/" in key}
        if kinds:
            return torch.bfloat16 if "master" in kinds else torch.float32
    return torch.bfloat16 if resolve_precision(config, "cpu") == "bf16" else torch.float32


def _keys(checkpoint: Path) -> Iterator[str]:
    """Yield the names of a checkpoint's tensors. Raises: ConfigError if a file cannot be read."""
    for path in sorted(checkpoint.glob("optimizer*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                yield from file.keys()
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
