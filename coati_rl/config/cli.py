"""argv -> the configuration of a command. The flags are built from its model; --config reads the same fields from YAML,
flags win.

Whatever is wrong ends in one ConfigError that names field, value and remedy.
"""

import argparse
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from coati_rl import __version__
from coati_rl.config.commands import commands_with
from coati_rl.config.config import Config
from coati_rl.config.fields import described, shown, spelling
from coati_rl.config.named_paths import read_json, read_paths
from coati_rl.config.needs import needed
from coati_rl.config.other_names import answer_for
from coati_rl.config.presets import without_dependents
from coati_rl.config.sections import JobConfig
from coati_rl.config.tasks import TaskConfig
from coati_rl.config.yaml_file import read_yaml
from coati_rl.errors import ConfigError
from coati_rl.text import did_you_mean

Job = TypeVar("Job", bound=JobConfig)

_NEGATIVE = re.compile(r"-\.?\d")
_PATHS = ("dataset", "eval_dataset")  # repeated for several
# JSON objects, with an example of each.
_OBJECTS = {"tasks": '{"math": {"reward_type": "boxed"}}', "chat_template_kwargs": '{"enable_thinking": false}'}


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._negative_number_matcher = _NEGATIVE  # argparse's own takes -1e-3 and -10,10 for flags

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the flags)")


class _Joined(argparse.Action):
    """Take several words as one, with commas."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, words: Any, __: str | None = None) -> None:
        setattr(namespace, self.dest, ",".join(words))


class _Help(argparse.Action):
    """--help prints all groups of flags, --help GROUP one of them; both exit."""

    def __init__(self, *args: Any, job: type[JobConfig], **options: Any) -> None:
        super().__init__(*args, **options)
        self._job = job

    def __call__(self, parser: argparse.ArgumentParser, _: Any, group: Any, __: str | None = None) -> None:
        groups = self._job.sections()
        if group is not None and group not in groups:
            raise ConfigError(f"--help {group}: there is no such group of flags; use {', '.join(groups)}")
        build_parser(group, self._job).print_help()
        parser.exit()


@functools.cache
def build_parser(group: str | None = None, job: type[JobConfig] = Config) -> argparse.ArgumentParser:
    """All flags of a job's config in groups, one for each section; or one group. Plus --config and --dry-run."""
    parser = _Parser(
        prog=job.prog(),
        usage=f"%(prog)s {_required(job)} [--config FILE.yaml] [--dry-run] [flags of the groups below]",
        description=f"{job.SUMMARY} --help GROUP shows one group of flags: {', '.join(job.sections())}.",
        allow_abbrev=False,
        add_help=False,
    )
    fields, sections, section_of = job.fields(), job.sections(), job.section_of()
    for title, names in _groups(group, job).items():
        summaries = dict.fromkeys(sections[section_of[name]].__doc__ or "" for name in names)
        listed = parser.add_argument_group(title, " ".join(summaries))
        for name in names:
            _add_flag(listed, name, fields[name], needed(job, name))
    general = parser.add_argument_group("general")
    general.add_argument(
        "-h",
        "--help",
        action=_Help,
        job=job,
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="GROUP",
        help="List flags and exit.",
    )
    general.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    general.add_argument(
        "--config",
        action="append",
        default=[],
        type=_config_path,
        metavar="FILE.yaml",
        help="Read fields from YAML; flags override them.",
    )
    general.add_argument("--dry-run", action="store_true", help="Print the resolved plan and exit.")
    return parser


def _config_path(text: str) -> Path:
    if not text:
        raise ConfigError("--config '': is empty; give an existing YAML file, or leave it out")
    return Path(text)


def _required(job: type[JobConfig]) -> str:
    """Return the flags that every command is given, for its usage."""
    return "-m TEXT -d TEXT" if "dataset" in job.fields() else "-m TEXT"


def _groups(group: str | None, job: type[JobConfig]) -> dict[str, list[str]]:
    """Title -> fields of the groups of --help; the two flags that every run is given come first."""
    groups = {name: [*section.model_fields] for name, section in job.sections().items()}
    if group is not None:
        return {group: groups[group]}
    if "data" not in groups:
        return groups
    model_and_data = dict.fromkeys(["model", "dataset", *groups.pop("model"), *groups.pop("data")])
    return {"model and data": [*model_and_data], **groups}


def _add_flag(parser: argparse._ArgumentGroup, name: str, field: FieldInfo, needs: str) -> None:
    long, short = spelling(name, field), described(field, "short")
    names = [*([short] if short else []), long, *(described(field, "aliases") or ())]
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    if bool in (field.annotation, *get_args(field.annotation)):
        options["action"] = argparse.BooleanOptionalAction  # --no-... overrides a file's true
    else:
        options["metavar"] = described(field, "metavar") or _metavar(field)
        if get_origin(field.annotation) is tuple and _choices(field):
            options |= {"action": _Joined, "nargs": "+"}
        if field.annotation == list[str] or name in _PATHS:
            options["action"] = "append"
    is_empty = field.default is None or field.default is False or field.default in ([], {}, ())
    default = "" if is_empty else f" [{shown(field.default)}]"
    needed = f" Needs {needs}." if needs else ""
    parser.add_argument(*names, help=f"{field.description}{needed}{default}".replace("%", "%%"), **options)


def _choices(field: FieldInfo) -> list[str]:
    args = (field.annotation, *get_args(field.annotation))
    return [choice for arg in args for choice in get_args(arg) if isinstance(choice, str)]


def _metavar(field: FieldInfo) -> str:
    if choices := _choices(field):
        return "{" + ",".join(dict.fromkeys(choices)) + "}"
    text = str(field.annotation)
    return next((kind.upper() for kind in ("int", "float", "dict") if kind in text), "TEXT").replace("DICT", "JSON")


def parse(argv: Sequence[str]) -> tuple[Config, bool]:
    """Parse the command line of reinforcement learning; see `parse_job`."""
    return parse_job(argv, Config)


def parse_job(argv: Sequence[str], job: type[Job]) -> tuple[Job, bool]:
    """Returns: the job's config, and whether only a plan is wanted (--dry-run). Raises: ConfigError."""
    parser = build_parser(job=job)
    argv = _known_spellings(argv, {name for action in parser._actions for name in action.option_strings}, job)
    given = vars(parser.parse_args(argv))
    paths, dry_run = given.pop("config"), given.pop("dry_run")
    if len(paths) > 1:
        raise ConfigError(f"--config {' --config '.join(map(str, paths))}: one file is read; write all fields into one")
    values = without_dependents(read_yaml(paths[0], job), given, job.fields()) if paths else {}
    values.update(given)
    return build_job({name: _from_text(name, value, job) for name, value in values.items()}, job), dry_run


def _known_spellings(argv: Sequence[str], names: set[str], job: type[JobConfig]) -> list[str]:
    """--train_batch_size is --train-batch-size and the other way round. Raises: ConfigError for an unknown flag."""
    by_hyphens = {name.replace("_", "-"): name for name in names}
    known = []
    for number, word in enumerate(argv, 1):
        glued = re.fullmatch(r"(-[A-Za-z]+)(\d+)", word)  # -t4 is -t 4
        name, equals, value = (glued[1], "=", glued[2]) if glued else word.partition("=")
        if re.fullmatch(r"--?[A-Za-z][\w.-]*", name):
            found = by_hyphens.get(name.replace("_", "-"))
            if found is None:
                after = (each for each in argv[number : number + 1] if not each.startswith("--"))
                given = value if equals else next(after, None)
                if told := job.refusal(name, given):
                    raise ConfigError(told)
                if others := commands_with(name):
                    raise ConfigError(f"{name}: is a flag of coati-rl {' | '.join(others)}, and {job.prog()} lacks it")
                remedy = answer_for(name) or did_you_mean(name, names, "--help lists the flags")
                raise ConfigError(f"unknown flag {name}; {remedy}")
            word = found + equals + value
        known.append(word)
    return known


def build_config(values: dict[str, Any]) -> Config:
    """Validate the fields of reinforcement learning; see `build_job`."""
    return build_job(values, Config)


def build_job(values: dict[str, Any], job: type[Job]) -> Job:
    """Validate fields one by one. Raises: ConfigError with every wrong field on a line of its own.

    Args:
        values: by flat name, by section, or both.
        job: whose fields they are.
    """
    try:
        values = job.known(values)
        return job(**values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem, values, job) for problem in error.errors())) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _from_text(name: str, value: Any, job: type[JobConfig]) -> Any:
    """Return what a shell can only say as text, and YAML may: None, and JSON objects."""
    texts = [value] if isinstance(value, str) else value
    if name in _PATHS and texts and isinstance(texts, list) and all(isinstance(each, str) for each in texts):
        field = job.fields()[name]
        needs_names = described(field, "metavar") == "NAME=PATH"
        return None if texts[-1] == "None" else read_paths(spelling(name, field), texts, needs_names=needs_names)
    if value == "None":
        return None
    if value == ["None"] and job.fields()[name].get_default(call_default_factory=True) == []:
        return []  # of a flag that is repeated for several, such as --stop
    if name in _OBJECTS and isinstance(value, str):
        try:
            return read_json(value)
        except (ValueError, RecursionError) as error:
            remedy = f"write '{_OBJECTS[name]}', or {name}: in a --config file"
            raise ConfigError(
                f"{spelling(name, job.fields()[name])} {value!r}: not JSON ({error}); {remedy}"
            ) from error
    return value


def _explain(problem: Any, values: dict[str, Any], job: type[JobConfig]) -> str:
    """A mistake by the name of its flag; `values` are flat."""
    message, fields = str(problem["msg"]).removeprefix("Value error, "), job.fields()
    name, *parts = [*problem["loc"][1:], ""] if problem["loc"] and problem["loc"][0] in job.sections() else [""]
    if problem["type"] == "extra_forbidden" and name == "tasks":
        task, setting = parts[:2]
        known = tuple(TaskConfig.model_fields)
        remedy = did_you_mean(str(setting), known, f"use {', '.join(known)}")
        told = job.refusal(str(setting), problem["input"]) or f"{setting!r}: no setting of a task; {remedy}"
        return f"--tasks {task!r}: {told}"
    if name not in fields:
        return message
    part = "".join(f"{key!r}: " for key in parts[:-1])  # the entry of an object or a list
    source = "" if name in values or "algo" not in fields else f" (set by --algo {values.get('algo')})"
    return f"{spelling(name, fields[name])} {part}{problem['input']!r}{source}: {message}"
