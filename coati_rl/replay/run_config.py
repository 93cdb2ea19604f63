"""Read the configuration that a run has resolved, of whichever command it is."""

import json
from pathlib import Path
from typing import Any

import torch

from coati_rl.config.cli import build_job
from coati_rl.config.commands import TRAINING
from coati_rl.config.plan import resolve_precision
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.run_reader.run_directory import RunDirectory


def config_of(run: RunDirectory) -> TrainingConfig:
    """Return the run's configuration. Raises: ConfigError if it is of another version, or of none of the jobs."""
    values = run.config()
    kinds = sorted(TRAINING.values(), key=lambda kind: len({*values} ^ {*kind.fields()}))
    if unknown := sorted({*values} - {*kinds[0].fields()}):
        raise ConfigError(f"{run.path / 'config.yaml'}: has {', '.join(unknown[:3])}, which this version does not know")
    return build_job(values, kinds[0])


def precision_of(run: RunDirectory, config: TrainingConfig) -> torch.dtype:
    """Return what the run's trainers compute in: that of its checkpoints, else what the configuration asks for here."""
    for checkpoint in run.checkpoints():
        dtype = _saved_dtype(checkpoint)
        if dtype is not None:
            return torch.bfloat16 if dtype == "bfloat16" else torch.float32
    return torch.bfloat16 if resolve_precision(config, "cpu") == "bf16" else torch.float32


def _saved_dtype(checkpoint: Path) -> str | None:
    """Return the dtype of a checkpoint's weights; None of adapters, whose base has its own."""
    path = checkpoint / "config.json"
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    dtype = found.get("dtype") or found.get("torch_dtype")
    return None if dtype is None else str(dtype)
