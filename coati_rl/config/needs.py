"""Refuse settings without effect, since another setting is off; which one they need is said where they are defined."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from coati_rl.config.fields import given_flags, needs_of, shown, spelling
from coati_rl.config.sections import JobConfig


def need_problems(config: JobConfig) -> Iterator[str]:
    """Yield the settings that nothing reads, those that lack the same in one message, with a remedy."""
    fields, useless = config.fields(), dict[str, list[str]]()
    values = config.values()
    for section in (getattr(config, name) for name in config.sections()):
        for name, flag in given_flags(section).items():
            needs = needs_of(type(section), name)
            if needs and not any(_is_on(values[other], wanted) for other, wanted in needs.items()):
                useless.setdefault(_named(needs, fields), []).append(flag)
    for needed, flags in useless.items():
        them = "it" if len(flags) == 1 else "them"
        yield f"{' and '.join(flags)} without {needed}: has no effect; add that, or leave {them} out"


def needed(job: type[JobConfig], name: str) -> str:
    """Return what a field needs, as flags; empty if it needs nothing."""
    needs = needs_of(job.sections()[job.section_of()[name]], name)
    return _named(needs, job.fields()) if needs else ""


def _is_on(value: Any, wanted: tuple[Any, ...]) -> bool:
    return value in wanted if wanted else bool(value) and value != "none"


def _named(needs: Mapping[str, tuple[Any, ...]], fields: Mapping[str, FieldInfo]) -> str:
    return " or ".join(
        spelling(name, fields[name]) + (f" {' or '.join(map(shown, wanted))}" if wanted else _above_0(fields[name]))
        for name, wanted in needs.items()
    )


def _above_0(field: FieldInfo) -> str:
    """Return what switches a field on that is a number and never None."""
    return " above 0" if isinstance(field.default, float) else ""
