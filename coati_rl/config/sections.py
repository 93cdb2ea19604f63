"""Compose a job's configuration from sections, which are addressed by section (`config.sampling.temperature`) and by
flat field name, as flags, run directories and checkpoints do.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, model_validator
from pydantic.fields import FieldInfo

from coati_rl.config.fields import STRICT, Section, described, spelling
from coati_rl.text import did_you_mean

Setting = TypeVar("Setting")


class JobConfig(BaseModel):
    """A job's sections. A field name occurs in one section only, so that it alone says which field is meant.

    It is made from sections, from flat fields, or from both: `{"sampling": {"temperature": 0.7}, "seed": 1}`.
    """

    model_config = STRICT

    COMMAND: ClassVar[str] = ""  # as a user types it, without flags
    SUMMARY: ClassVar[str] = ""  # of --help

    @classmethod
    def prog(cls) -> str:
        """Return the program's name in messages."""
        return cls.COMMAND.removeprefix("python ")

    # Of a class these three are always the same, and a parser of flags asks for each flag.
    @classmethod
    @functools.cache
    def sections(cls) -> Mapping[str, type[Section]]:
        """Return the section classes by name, in the order of --help."""
        found = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, Section)}

    @classmethod
    @functools.cache
    def fields(cls) -> Mapping[str, FieldInfo]:
        """Return all fields by flat name, section by section."""
        return {name: field for section in cls.sections().values() for name, field in section.model_fields.items()}

    @classmethod
    @functools.cache
    def section_of(cls) -> Mapping[str, str]:
        """Return the name of each field's section."""
        return {name: key for key, section in cls.sections().items() for name in section.model_fields}

    @classmethod
    @functools.cache
    def field_names(cls) -> Mapping[str, str]:
        """Return the field of each name that a flag has: its field's, its spelling, its aliases, with underscores."""
        names = {
            flag.lstrip("-").replace("-", "_"): name
            for name, field in cls.fields().items()
            for flag in (spelling(name, field), *(described(field, "aliases") or ()))
        }
        return names | {name: name for name in cls.fields()}

    @classmethod
    def is_section(cls, key: str, value: Any) -> bool:
        """True if a key means a section: `model` is the field too, unless the value holds fields."""
        return key in cls.model_fields and (isinstance(value, Section | Mapping) or key not in cls.section_of())

    @classmethod
    def flattened(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values by flat field name. Raises: ValueError for a field given twice or in a wrong section.

        A field may also be called as its flag: `context_parallel`, of --context-parallel, is `context_parallel_size`.
        """
        flat: dict[str, Any] = {}
        section_of, field_names, places = cls.section_of(), cls.field_names(), dict[str, str]()
        for key, value in values.items():
            in_section = cls.is_section(key, value)
            for given, inner in _given(key, value).items() if in_section else [(key, value)]:
                place, name = f"{key}.{given}" if in_section else str(key), field_names.get(given, given)
                if in_section and section_of.get(name) != key:
                    raise ValueError(cls.unknown(place, inner))
                if name in places:
                    raise ValueError(f"{name} is set twice, as {places[name]} and as {place}; keep one of them")
                flat[name], places[name] = inner, place
        return flat

    @classmethod
    def known(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return `flattened` values. Raises: ValueError also for a name that is no field."""
        flat, section_of = cls.flattened(values), cls.section_of()
        for name, value in flat.items():
            if name not in section_of:
                raise ValueError(cls.unknown(str(name), value))
        return flat

    @classmethod
    def unknown(cls, place: str, value: Any) -> str:
        """Return why there is no field of this name, or of SECTION.NAME, with a remedy."""
        section, _, name = place.rpartition(".")
        section_of, sections = cls.section_of(), cls.sections()
        if (field := cls.field_names().get(name)) is not None:
            return f"unknown field {place!r}; it belongs to {section_of[field]}"
        known = sections[section].model_fields if section in sections else [*section_of, *sections]
        help_flag = f"--help {section}" if section in sections else "--help"
        remedy = did_you_mean(name, known, f"{help_flag} lists the fields (hyphens become underscores)")
        return cls.refusal(place, value) or f"unknown field {place!r}; {remedy}"

    @classmethod
    def refusal(cls, name: str, value: Any) -> str | None:
        """Return why a setting of other systems cannot be one of this job; None if its name is not known."""
        return None

    @model_validator(mode="before")
    @classmethod
    def _sort_into_sections(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        section_of, nested = cls.section_of(), dict[str, Any]()
        for name, value in cls._completed(cls.flattened(values)).items():
            if name in section_of:
                nested.setdefault(section_of[name], {})[name] = value
            else:
                nested[name] = value  # refused as unknown, with all other mistakes
        return nested

    @classmethod
    def _completed(cls, flat: dict[str, Any]) -> dict[str, Any]:
        """Return the flat values with those that follow from them in other sections."""
        return flat

    def flat(self, mode: Literal["python", "json"] = "python") -> dict[str, Any]:
        """Return all values by flat field name, the form in which a configuration is stored and compared."""
        sections = self.model_dump(mode=mode)
        return {name: value for key in type(self).sections() for name, value in sections[key].items()}

    def values(self) -> dict[str, Any]:
        """Return all values by flat field name, as they are: no copies, no plain types in place of models."""
        return {name: getattr(getattr(self, section), name) for name, section in type(self).section_of().items()}

    def setting(self, name: str, default: Setting) -> Setting:
        """Return the value of a field by flat name; `default` for a command that has no such field."""
        section = type(self).section_of().get(name)
        value: Setting = default if section is None else getattr(getattr(self, section), name)
        return value

    def with_changes(self, **changes: Any) -> Self:
        """Return a copy in which these fields, by flat name, have other values, which are not validated.

        Raises: KeyError for a name that is no field.
        """
        section_of, nested = type(self).section_of(), dict[str, dict[str, Any]]()
        for name, value in changes.items():
            nested.setdefault(section_of[name], {})[name] = value
        return self.model_copy(
            update={key: getattr(self, key).model_copy(update=inner) for key, inner in nested.items()}
        )


def _given(key: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, Section):
        return {name: getattr(value, name) for name in value.model_fields_set}
    if value is None:
        return {}  # a section without fields in a file
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is a section and holds a {type(value).__name__}; write its fields below it")
    return value
