"""Read the fields of --config FILE.yaml: nested by section, flat, or both."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from coati_rl.config.sections import JobConfig
from coati_rl.errors import ConfigError
from coati_rl.yaml_text import repeated_key


def read_yaml(path: Path, job: type[JobConfig]) -> dict[str, Any]:
    """Fields of a YAML file by flat name. Raises: ConfigError.

    Refused are a missing file, bad YAML, an unknown key, a key in another section than its own, and a field, or a key
    below it, that is given twice.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        keys = [*_keys(node, job)] if isinstance(node, yaml.MappingNode) else []  # before merge keys (<<) are resolved
        repeated = repeated_key(node)
        values = {} if node is None else loader.construct_document(node)
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error}); give an existing YAML file") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no text, dates that do not exist
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: holds a {type(values).__name__}; write one 'name: value' a line")
    _refuse_repeated(path, keys)
    if repeated:
        raise ConfigError(f"--config {path}: {repeated}")
    try:
        return job.known(values)
    except ValueError as error:
        raise ConfigError(f"--config {path}: {error}") from error


def _refuse_repeated(path: Path, keys: Iterable[tuple[str, str, int]]) -> None:
    """YAML keeps the last of two equal keys; here they are a mistake, as is a field given flat and in its section."""
    places: dict[str, tuple[str, int]] = {}
    for field, key, line in keys:
        if field in places:
            other, first = places[field]
            raise ConfigError(
                f"--config {path}: {field} is set twice, as {other} in line {first} and as {key} in line {line}; "
                "keep one of them"
            )
        places[field] = key, line


def _keys(node: yaml.MappingNode, job: type[JobConfig]) -> Iterator[tuple[str, str, int]]:
    """Field (or section), key as written, and line of every key of the file and of its sections."""
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if isinstance(value_node, yaml.MappingNode) and job.is_section(key, {}):
            yield f"section {key}", key, line
            for inner, _ in value_node.value:
                yield str(inner.value), f"{key}.{inner.value}", inner.start_mark.line + 1
        else:
            yield key, key, line
