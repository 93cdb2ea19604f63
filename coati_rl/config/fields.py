"""Describe a config field as a command-line flag. A flag, its default, its help and its role exist once: on the field.

The long flag is the field's name with hyphens; a few keep the underscore of the reference's command line.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from coati_rl.plugins import absolute_plugin, is_plugin

Role = Literal["experiment", "execution"]

# Settings of which one must have one of these values, or with none named be on: not None, not 0, not "none", not empty.
Needs = Mapping[str, tuple[Any, ...]]

STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Settings(BaseModel):
    """Fields whose numbers are numbers: pydantic takes true for 1, which YAML reads where on or yes is written."""

    @field_validator("*", mode="before")
    @classmethod
    def _a_number_is_no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool):
            annotation = cls.model_fields[str(info.field_name)].annotation
            kinds = {annotation, *get_args(annotation)}
            if bool not in kinds and kinds & {int, float}:
                raise ValueError("is no number (YAML reads on, off, yes and no as true and false); give one, or None")
        return value


class Section(Settings):
    """The settings of one part of a job; also a group of flags in --help."""

    model_config = STRICT

    NEEDS: ClassVar[Needs] = {}  # of all fields but those that it names, unless they say what they need


def flag(
    default: Any,
    help_text: str,
    *,
    role: Role,
    short: str | None = None,
    spelling: str | None = None,
    metavar: str | None = None,
    follows: tuple[str, ...] = (),
    only_for: str | None = None,
    needs: Needs | None = None,
    aliases: tuple[str, ...] = (),
    **bounds: Any,
) -> Any:
    """A pydantic field that is also a command-line flag.

    Args:
        default: the value without the flag.
        help_text: one line with the unit and what special values mean.
        role: experiment decides what is learned, and a resumed run reports that it changed; execution (layout, memory,
            paths, logging) may differ.
        short: the one-dash form, such as "-tbs".
        spelling: the long form where it is not the field's name with hyphens.
        metavar: what --help shows for the value where its type does not say enough.
        follows: fields from which this one is derived unless it is given: where a flag changes one of them, the value
            of --config is derived again.
        only_for: the kind of reward, code or math, that reads this field; without one it has no effect.
        needs: without which this field has no effect, so that it is refused (`config.needs`).
        aliases: further long forms, which other systems use.
        bounds: pydantic's ge, gt, le, lt.
    """
    extra: dict[str, Any] = {"role": role, "short": short, "spelling": spelling, "metavar": metavar}
    extra |= {"follows": list(follows), "only_for": only_for, "needs": needs, "aliases": list(aliases)}
    return Field(default, description=help_text, json_schema_extra=extra, **bounds)


def function_or(*names: str) -> AfterValidator:
    """Return the check of a text that is one of some names, or FILE.py:FUNCTION, whose path becomes absolute."""

    def check(text: str | None) -> str | None:
        if text is None or text in names:
            return text
        if not is_plugin(text):
            raise ValueError(f"unknown; use {', '.join(names)}{', or ' if names else ''}FILE.py:FUNCTION")
        return absolute_plugin(text)

    return AfterValidator(check)


def split_range(value: Any) -> Any:
    """Return LOW,HIGH as two numbers, before pydantic's own validation. Raises: ValueError for other text."""
    if value is None:
        return None
    try:
        low, high = value.split(",") if isinstance(value, str) else value
        return float(low), float(high)
    except (TypeError, ValueError) as error:
        raise ValueError("give two numbers, LOW,HIGH, like 0,1; or None") from error


Range = Annotated[tuple[float, float], BeforeValidator(split_range)]
OptionalRange = Annotated[tuple[float, float] | None, BeforeValidator(split_range)]
experiment = partial(flag, role="experiment")
execution = partial(flag, role="execution")


def described(field: FieldInfo, key: str) -> Any:
    """Return what `flag` was given for a field under `key`; None if nothing was."""
    extra = field.json_schema_extra
    return extra.get(key) if isinstance(extra, dict) else None


def shown(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def role_of(field: FieldInfo) -> Role:
    """Return whether a field decides what is learned (experiment) or how it is carried out (execution)."""
    role: Role = described(field, "role")
    return role


def spelling(name: str, field: FieldInfo) -> str:
    """Return the long flag of a field."""
    return str(described(field, "spelling") or "--" + name.replace("_", "-"))


def needs_of(section: type[Section], name: str) -> Needs | None:
    """Return what a section's field needs to have an effect; None if it needs nothing."""
    own: Needs | None = described(section.model_fields[name], "needs")
    return own or (None if name in section.NEEDS else section.NEEDS)


def given_flags(section: Section) -> dict[str, str]:
    """Return the fields of a section that differ from their defaults, each as the flag that sets it."""
    found = dict[str, str]()
    for name, field in type(section).model_fields.items():
        value, flag = getattr(section, name), spelling(name, field)
        if value == field.get_default(call_default_factory=True):
            continue
        if isinstance(value, bool):
            found[name] = flag if value else f"--no-{flag.removeprefix('--')}"
        else:
            found[name] = f"{flag} {' '.join(value) if isinstance(value, list) else shown(value)}"
    return found
