"""Hold a checkpoint that a run continues from, and compare its model and settings with those of the run."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from coati_rl.config.absolute_paths import with_absolute_paths
from coati_rl.config.fields import role_of
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError

Job = TypeVar("Job", bound=TrainingConfig)

_SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumedRun(ABC):
    """Hold a checkpoint that fits the configuration."""

    directory: Path  # the checkpoint
    num_steps: int  # optimizer steps of the whole run, including those before the checkpoint
    changes: tuple[str, ...]  # settings and data that differ from the checkpoint's run, one line each

    @property
    @abstractmethod
    def step(self) -> int:
        """Return the optimizer steps taken."""

    def line(self) -> str:
        """Return one line for the log."""
        return f"resumes from step {self.step} of {self.directory}"

    def record(self) -> dict[str, Any]:
        """Return the record of the resumption in the run directory, as JSON."""
        return {"step": self.step, "checkpoint": str(self.directory), "changes": list(self.changes)}


def read_settings(config: Job, directory: Path) -> Job | str:
    """Return the settings of the checkpoint's run, of the same job as `config`; a line that says why if it cannot."""
    path = directory.parent.parent / "config.yaml"
    try:
        return type(config).model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError, TypeError) as error:
        cause = " ".join(str(error).split())
        return f"settings are not compared with the checkpoint's run: {path} cannot be read: {cause}"


def changed_settings(before: Job, now: Job, *, sizes: tuple[str, ...], without: tuple[str, ...] = ()) -> list[str]:
    """Return the settings that affect the results and differ, one line each.

    Args:
        before: of the checkpoint's run.
        now: of this run.
        sizes: properties of the configuration that are compared instead of the flags that they follow from.
        without: fields that are compared elsewhere.
    """
    old, new = with_absolute_paths(before.flat()), with_absolute_paths(now.flat())
    names = [name for name, field in now.fields().items() if role_of(field) == "experiment" and name not in without]
    pairs = [(name, old[name], new[name]) for name in names]
    pairs += [(name, getattr(before, name), getattr(now, name)) for name in sizes]
    return [f"{name} was {was!r} and is {is_now!r} now" for name, was, is_now in pairs if was != is_now]


def check_shape(config: TrainingConfig, directory: Path) -> None:
    """Raise ConfigError if the checkpoint's model has other sizes than --model."""
    here, there = _shape(Path(config.model.model)), _shape(directory)
    differences = [f"{name} {there[name]} instead of {here[name]}" for name in _SHAPE if here[name] != there[name]]
    if differences:
        raise ConfigError(
            f"--checkpoint-path {directory}: its model differs from --model {config.model.model}: "
            f"{', '.join(differences)}; use the --model of that run"
        )


def _shape(directory: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(directory, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--checkpoint-path {directory}: config.json cannot be read: {error}") from error
    return {name: getattr(model, name, None) for name in _SHAPE}
