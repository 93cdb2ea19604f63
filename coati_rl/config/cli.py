"""argv -> Config. The flags are built from the config model; --config reads the same fields from YAML, flags win.

Whatever is wrong ends in one ConfigError that names field, value and remedy.
"""

import argparse
import difflib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from coati_rl.config.config import Config
from coati_rl.config.named_paths import read_paths
from coati_rl.config.presets import without_dependents
from coati_rl.config.tasks import TaskConfig
from coati_rl.errors import ConfigError


_PATHS = ("dataset", "eval_dataset")  # repeated for several


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the flags)")


def spelling(name: str, field: FieldInfo) -> str:
    """The long flag of a field."""
    return str(_extra(field, "spelling") or "--" + name.replace("_", "-"))


def _extra(field: FieldInfo, key: str) -> str | None:
    extra = field.json_schema_extra
    value = extra.get(key) if isinstance(extra, dict) else None
    return None if value is None else str(value)


def build_parser() -> argparse.ArgumentParser:
    """All flags of the config model, plus --config and --dry-run."""
    parser = _Parser(
        prog="rl_example.py",
        description="Reinforcement learning of a language model: vLLM producers, ColossalAI trainers, rewards.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="Read fields from YAML; flags override them.")
    parser.add_argument("--dry-run", action="store_true", help="Print the resolved plan and exit.")
    for name, field in Config.model_fields.items():
        _add_flag(parser, name, field)
    return parser


def _add_flag(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    long, short = spelling(name, field), _extra(field, "short")
    names = [short, long] if short else [long]
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    if field.annotation is bool:
        options["action"] = argparse.BooleanOptionalAction  # --no-... overrides a file's true
    else:
        options["metavar"] = _extra(field, "metavar") or _metavar(field)
        if field.annotation == list[str] or name in _PATHS:
            options["action"] = "append"
    default = "" if field.default is None or field.default is False or field.default == [] else f" [{field.default}]"
    parser.add_argument(*names, help=f"{field.description}{default}".replace("%", "%%"), **options)


def _metavar(field: FieldInfo) -> str:
    choices = [
        c for arg in (field.annotation, *get_args(field.annotation)) for c in get_args(arg) if isinstance(c, str)
    ]
    if choices:
        return "{" + ",".join(dict.fromkeys(choices)) + "}"
    text = str(field.annotation)
    return next((kind.upper() for kind in ("int", "float", "dict") if kind in text), "TEXT").replace("DICT", "JSON")


def parse(argv: Sequence[str]) -> tuple[Config, bool]:
    """Returns: the config, and whether only a plan is wanted (--dry-run). Raises: ConfigError."""
    parser = build_parser()
    argv = _known_spellings(argv, {name for action in parser._actions for name in action.option_strings})
    given = vars(parser.parse_args(argv))
    path, dry_run = given.pop("config"), given.pop("dry_run")
    values = without_dependents(read_yaml(Path(path)), given) if path else {}
    values.update(given)
    return build_config({name: _from_text(name, value) for name, value in values.items()}), dry_run


def _known_spellings(argv: Sequence[str], names: set[str]) -> list[str]:
    """--train_batch_size is --train-batch-size and the other way round. Raises: ConfigError for an unknown flag."""
    by_hyphens = {name.replace("_", "-"): name for name in names}
    known = []
    for word in argv:
        glued = re.fullmatch(r"(-[A-Za-z]+)(\d+)", word)  # -t4 is -t 4
        name, equals, value = (glued[1], "=", glued[2]) if glued else word.partition("=")
        if re.fullmatch(r"--?[A-Za-z][\w-]*", name):
            found = by_hyphens.get(name.replace("_", "-"))
            if found is None:
                raise ConfigError(f"unknown flag {name}; {_did_you_mean(name, names, '--help lists the flags')}")
            word = found + equals + value
        known.append(word)
    return known


def _did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def build_config(values: dict[str, Any]) -> Config:
    """Validate fields one by one. Raises: ConfigError with every wrong field on a line of its own."""
    try:
        return Config(**values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem, values) for problem in error.errors())) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Fields of a YAML file. Raises: ConfigError for a missing file, bad YAML or an unknown key."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error}); give an existing YAML file") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no text, dates that do not exist
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: holds a {type(values).__name__}; write one 'name: value' a line")
    for key in values:
        if key not in Config.model_fields:
            otherwise = "--help lists the fields (hyphens become underscores)"
            remedy = _did_you_mean(str(key), Config.model_fields, otherwise)
            raise ConfigError(f"--config {path}: unknown key {key!r}; {remedy}")
    return values


def _from_text(name: str, value: Any) -> Any:
    """Return what a shell can only say as text, and YAML may: None, and JSON objects."""
    if name in _PATHS and isinstance(value, str | list) and value:
        texts = [value] if isinstance(value, str) else value
        flag = spelling(name, Config.model_fields[name])
        is_none = texts[-1] == "None"
        value = None if is_none else read_paths(flag, texts, needs_names=name == "eval_dataset")
    if value == "None":
        return None
    if name == "tasks" and isinstance(value, str):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            remedy = """write '{"math": {"reward_type": "boxed"}}', or tasks: in a --config file"""
            raise ConfigError(f"--tasks {value!r}: not JSON ({error}); {remedy}") from error
    return value


def _explain(problem: Any, values: dict[str, Any]) -> str:
    location = ".".join(str(part) for part in problem["loc"])
    if not location:
        return str(problem["msg"]).removeprefix("Value error, ")
    name = str(problem["loc"][0])
    if name not in Config.model_fields:
        return f"unknown field {location!r}; --help lists the fields"
    part = "".join(f"{key!r}: " for key in problem["loc"][1:])  # the entry of an object or a list
    if name == "tasks" and problem["type"] == "extra_forbidden":
        known = tuple(TaskConfig.model_fields)
        remedy = _did_you_mean(str(problem["loc"][-1]), known, f"use {', '.join(known)}")
        return f"--tasks {part}no setting of a task; {remedy}"
    source = "" if name in values else f" (set by --algo {values.get('algo')})"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{spelling(name, Config.model_fields[name])} {part}{problem['input']!r}{source}: {message}"
