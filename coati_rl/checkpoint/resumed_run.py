"""Hold a checkpoint that a run continues from, and compare its model and settings with those of the run."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from coati_rl.checkpoint.directory import find_checkpoint, load_state
from coati_rl.checkpoint.former_settings import read_flat
from coati_rl.checkpoint.saved_adapter import check_saved_adapter
from coati_rl.checkpoint.settings_files import settings_file
from coati_rl.config.absolute_paths import with_absolute_paths
from coati_rl.config.fields import role_of
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.model_files.config import read_config, setting

Job = TypeVar("Job", bound=TrainingConfig)

DATE_KEY = "template_date"  # of a checkpoint's state

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


def kept_date(checkpoint_path: str | None) -> str | None:
    """Return the date that the templates of a checkpoint's run write; None if it has none. Raises: ConfigError."""
    if checkpoint_path is None:
        return None
    try:
        date = load_state(find_checkpoint(Path(checkpoint_path))).get(DATE_KEY)
    except ValueError:  # which is reported when the whole checkpoint is read
        return None
    return date if isinstance(date, str) else None


def date_hint(config: TrainingConfig) -> str:
    """Return what to try where rows differ from a checkpoint's, if chat templates write the date; else nothing."""
    date = config.data.template_date
    return "" if date is None else f" (the chat template writes the date, here {date}; --template-date sets it)"


def read_settings(config: Job, directory: Path) -> Job | str:
    """Return the settings that wrote a checkpoint, of the same job as `config`; a line that says why if it cannot."""
    path = settings_file(directory)
    try:
        return type(config).model_validate(read_flat(config, directory))
    except (OSError, ValueError, yaml.YAMLError, TypeError, AttributeError) as error:
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
    """Raise ConfigError if the checkpoint's model has other sizes than --model, or other adapters than the run's."""
    check_saved_adapter(config, directory)
    if config.lora.is_on:  # the base is --model
        return
    model = Path(config.model.model)
    here, there = _shape(model, f"--model {model}"), _shape(directory, f"--checkpoint-path {directory}")
    if here["tie_word_embeddings"] and not there["tie_word_embeddings"] and _has_own_head(model):
        here["tie_word_embeddings"] = False  # as checkpoints of such a model say
    differences = [f"{name} {there[name]} instead of {here[name]}" for name in _SHAPE if here[name] != there[name]]
    if differences:
        raise ConfigError(
            f"--checkpoint-path {directory}: its model differs from --model {config.model.model}: "
            f"{', '.join(differences)}; use the --model of that run"
        )


def _has_own_head(directory: Path) -> bool:
    where = f"--model {directory}"
    from coati_rl.model_files.stored import read_stored  # imports torch
    from coati_rl.model_files.values import has_own_head

    return has_own_head(read_stored(directory, where), None, where)


def _shape(directory: Path, where: str) -> dict[str, Any]:
    model = read_config(directory, where).get_text_config()
    return {name: setting(model, name) for name in _SHAPE}
