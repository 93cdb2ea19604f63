"""Go on with the former behaviour of settings that the run of a checkpoint did not have yet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from coati_rl.checkpoint.directory import find_checkpoint
from coati_rl.checkpoint.settings_files import settings_file
from coati_rl.config.fields import spelling
from coati_rl.config.trainers import LAYOUT_FIELDS, TrainersConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.plugins import is_plugin
from coati_rl.yaml_text import parse_yaml

Job = TypeVar("Job", bound=TrainingConfig)

# What a run did that did not write the field; a resumed run goes on with it, unless the flag is given.
FORMER: Mapping[str, Any] = {"weight_decay_exempt": "none"}


def read_flat(config: TrainingConfig, directory: Path) -> dict[str, Any]:
    """Return the settings that wrote a checkpoint by flat name, with the former value of those that they lack.

    Raises: OSError, ValueError, TypeError or yaml.YAMLError if their file cannot be read.
    """
    written = type(config).flattened(parse_yaml(settings_file(directory).read_text(encoding="utf-8")))
    return written if is_plugin(str(written.get("optimizer"))) else {**FORMER, **written}  # they are AdamW's


def with_former_settings(config: Job) -> tuple[Job, tuple[str, ...]]:
    """Return the configuration of a resumed run with the checkpoint's values in these fields, and a warning for each.

    A field that was given stays as it is, and all of them where the settings of the checkpoint's run are not there.

    Raises: ConfigError if there is no checkpoint.
    """
    if config.run.checkpoint_path is None or is_plugin(config.optimizer.optimizer):
        return config, ()
    try:
        before = read_flat(config, find_checkpoint(Path(config.run.checkpoint_path)))
    except (OSError, ValueError, yaml.YAMLError, TypeError, AttributeError):
        return config, ()  # the comparison of the settings says that it cannot be read
    fields, values = config.fields(), config.flat()
    given = config.optimizer.model_fields_set
    kept = {name: before[name] for name in FORMER if name not in given and before[name] != values[name]}
    warnings = [
        f"{spelling(name, fields[name])} {value}: goes on as in the run of the checkpoint; the default of a new run is "
        f"{values[name]}"
        for name, value in kept.items()
    ]
    return config.with_changes(**kept), tuple(warnings)


def former_layout(config: TrainingConfig) -> Mapping[str, Any] | None:
    """Return the layout of the run that is resumed, by flat name; None if none is, or it had other trainers."""
    if config.run.checkpoint_path is None:
        return None
    try:
        before = read_flat(config, find_checkpoint(Path(config.run.checkpoint_path)))
    except (OSError, ValueError, yaml.YAMLError, TypeError, AttributeError):
        return None  # the comparison of the settings says that it cannot be read
    if before.get("num_trainers") != config.parallel.num_trainers:
        return None
    return {name: before.get(name, getattr(TrainersConfig(), name)) for name in LAYOUT_FIELDS}
