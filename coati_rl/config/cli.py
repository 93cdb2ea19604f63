"""argv -> Config. The flags are built from the config model; --config reads the same fields from YAML, flags win.

Whatever is wrong ends in one ConfigError that names field, value and remedy.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from coati_rl.config.config import Config
from coati_rl.config.fields import described, spelling
from coati_rl.config.presets import without_dependents
from coati_rl.config.yaml_file import did_you_mean, read_yaml
from coati_rl.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the flags)")


def build_parser() -> argparse.ArgumentParser:
    """All flags of the config model, plus --config and --dry-run."""
    parser = _Parser(
        prog="rl_example.py",
        description="Reinforcement learning of a language model: vLLM producers, ColossalAI trainers, rewards.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="Read fields from YAML; flags override them.")
    parser.add_argument("--dry-run", action="store_true", help="Print the resolved plan and exit.")
    for name, field in Config.fields().items():
        _add_flag(parser, name, field)
    return parser


def _add_flag(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    long, short = spelling(name, field), described(field, "short")
    names = [short, long] if short else [long]
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    if field.annotation is bool:
        options["action"] = argparse.BooleanOptionalAction  # --no-... overrides a file's true
    else:
        options["metavar"] = described(field, "metavar") or _metavar(field)
        if field.annotation == list[str]:
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
    values = without_dependents(read_yaml(Path(path), Config), given, Config.fields()) if path else {}
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
                raise ConfigError(f"unknown flag {name}; {did_you_mean(name, names, '--help lists the flags')}")
            word = found + equals + value
        known.append(word)
    return known


def build_config(values: dict[str, Any]) -> Config:
    """Validate fields one by one. Raises: ConfigError with every wrong field on a line of its own.

    Args:
        values: by flat name, by section, or both.
    """
    try:
        values = Config.flattened(values)
        return Config(**values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem, values) for problem in error.errors())) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _from_text(name: str, value: Any) -> Any:
    """Return what a shell can only say as text, and YAML may: None, and JSON objects."""
    if value == "None":
        return None
    if name == "eval_dataset" and isinstance(value, str):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"""--eval-dataset {value!r}: not JSON ({error}); write '{{"task": "path.jsonl"}}'"""
            ) from error
    return value


def _explain(problem: Any, values: dict[str, Any]) -> str:
    """A mistake by the name of its flag; `values` are flat."""
    message, fields = str(problem["msg"]).removeprefix("Value error, "), Config.fields()
    name, *parts = [*problem["loc"][1:], ""] if problem["loc"] and problem["loc"][0] in Config.sections() else [""]
    if problem["type"] == "extra_forbidden":
        return f"unknown field {'.'.join(str(part) for part in problem['loc'])!r}; --help lists the fields"
    if name not in fields:
        return message
    part = "".join(f"{key!r}: " for key in parts[:-1])  # the entry of an object or a list
    source = "" if name in values else f" (set by --algo {values.get('algo')})"
    return f"{spelling(name, fields[name])} {part}{problem['input']!r}{source}: {message}"
