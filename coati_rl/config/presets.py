"""The algorithms by name. A preset is a small YAML file: the parts it chooses, with the paper they are from.

In: the values that a user gave. Out: the same, completed by the preset's. A new algorithm that only combines parts is a
file beside the others, or --algo FILE.yaml.
"""

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from coati_rl.algorithms.choices import CORRECTION_BOUNDS
from coati_rl.config.fields import described
from coati_rl.plugins import absolute
from coati_rl.yaml_text import parse_yaml, repeated_key

PRESETS = {path.stem.upper(): path for path in sorted((Path(__file__).parent / "presets").glob("*.yaml"))}


def fill_in(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The given values, then the preset's, then what follows from both.

    KL without weight has no place unless one is given; a correction without bounds has its paper's.

    Args:
        values: as given: text, numbers or YAML's types.
        known: names that a preset may set.
    Raises: ValueError for an unknown preset, or one that sets something unknown.
    """
    merged = {**read_preset(str(values.get("algo", "GRPO")), known), **values}
    if "kl_place" not in values and _is_zero(merged.get("kl_coeff")):
        merged["kl_place"] = "none"
    for name, bound in CORRECTION_BOUNDS.get(str(merged.get("off_policy_correction")), {}).items():
        merged[name] = bound if merged.get(name) is None else merged[name]
    return merged


def read_preset(algo: str, known: Collection[str]) -> dict[str, Any]:
    """A preset's settings. Raises: ValueError."""
    path = PRESETS.get(algo.upper()) or absolute(algo)
    if algo.upper() not in PRESETS and path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--algo {algo!r}: unknown; use {', '.join(PRESETS)}, or a FILE.yaml of your own")
    try:
        settings, repeated = _parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:  # yaml's own conversions, as of dates, raise ValueError
        raise ValueError(f"--algo {algo}: cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"--algo {algo}: holds a {type(settings).__name__}; write one 'name: value' a line")
    if repeated:
        raise ValueError(f"--algo {algo}: {repeated}")
    unknown = [str(name) for name in settings if name not in known or name == "algo"]
    if unknown:
        raise ValueError(f"--algo {algo}: sets {', '.join(unknown)}, which is no setting of an algorithm")
    return {name: None if value == "None" else value for name, value in settings.items()}


@functools.cache  # a configuration takes 0.3 ms with it, 1.4 without
def _parsed(text: str) -> tuple[Any, str | None]:
    """Return what a preset's YAML holds, and what it says of a key that is there twice."""
    return parse_yaml(text) or {}, repeated_key(yaml.compose(text, Loader=yaml.SafeLoader))


def without_dependents(
    values: Mapping[str, Any], flags: Mapping[str, Any], fields: Mapping[str, FieldInfo]
) -> dict[str, Any]:
    """A file's values, less those that followed from what a flag changes now.

    The file may be a run's config.yaml, which holds every setting: with another --algo its parts are another
    algorithm's, with another KL weight or correction its place or bounds are.

    Args:
        values: of the file, by flat name.
        flags: those that were given, by flat name.
        fields: of the job; each says which fields it follows.
    """
    changed = set(flags)
    if "algo" in changed and str(flags["algo"]).upper() == str(values.get("algo", flags["algo"])).upper():
        changed.remove("algo")
    return {
        name: value
        for name, value in values.items()
        if name not in fields or changed.isdisjoint(described(fields[name], "follows"))
    }


def _is_zero(value: Any) -> bool:
    try:
        return float(value) == 0
    except (TypeError, ValueError):
        return False  # a mistake that the field's own check explains
