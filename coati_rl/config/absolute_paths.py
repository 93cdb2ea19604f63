"""Make the paths of a stored configuration absolute, so that it is read the same from another directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coati_rl.config.named_paths import read_sources
from coati_rl.config.user_paths import exists
from coati_rl.plugins import absolute

_SOURCES = ("dataset", "eval_dataset")  # fields whose texts may name several files, with shares
_MODELS = ("model", "teacher", "reference_model", "critic_model", "adapter")  # directories, or names of the hub
_OUTPUTS = ("save_dir", "eval_save_dir", "rollout_save_dir")  # directories, which may not exist yet


def with_absolute_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by flat field name with absolute paths; names of the hub, generators and texts stay as they are."""
    absolute = {name: _sources(values[name]) for name in _SOURCES if values.get(name)}
    absolute |= {name: _existing(values[name]) for name in _MODELS if values.get(name)}
    absolute |= {name: str(Path(values[name]).absolute()) for name in _OUTPUTS if values.get(name)}
    return {name: absolute.get(name, value) for name, value in values.items()}


def _sources(value: str | Mapping[str, str]) -> str | dict[str, str]:
    if not isinstance(value, str):
        return {name: str(_sources(text)) for name, text in value.items()}
    try:
        paths = [source.path for source in read_sources(value)]
    except ValueError:  # refused elsewhere
        return value
    if paths == [value]:
        return _existing(value)
    found = [_existing(path) for path in paths]
    if any("," in path for path in found):  # would be read as two
        return value
    parts = value.split(",")
    shares = [part.removeprefix(path) for part, path in zip(parts, paths, strict=True)]
    return ",".join(f"{path}{share}" for path, share in zip(found, shares, strict=True))


def _existing(text: str) -> str:
    """Return the absolute path of what exists; any other text as it is."""
    return str(absolute(text)) if exists(text) else text
