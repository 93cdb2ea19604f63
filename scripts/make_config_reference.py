"""Write docs/configuration.md from the config models: every flag with its short form, type, default, role and help.

    python scripts/make_config_reference.py [--check]

With --check nothing is written; the exit status is 1 if the page differs from the model.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from coati_rl.config import Config
from coati_rl.config.commands import OFFLINE
from coati_rl.config.fields import Section, described, role_of, shown, spelling
from coati_rl.config.needs import needed
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.sections import JobConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
MARK = "<!-- What follows is written by scripts/make_config_reference.py from the config model. -->\n"


def type_name(annotation: Any, metavar: str) -> str:
    """Describe a type in the words of someone who writes a flag; a tuple's parts have the names of `metavar`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        if get_origin(arguments[0]) is Literal:  # tuple[Literal["a", "b"], ...]
            return f"{type_name(arguments[0], metavar)}, or several"
        return metavar
    if origin in (list, dict):
        return {list: "text, repeated", dict: "JSON object"}[origin]
    if arguments and (origin is Union or type(annotation).__name__ == "UnionType"):
        return " or ".join(dict.fromkeys(type_name(a, metavar) for a in arguments if a is not type(None)))
    return {str: "text", bool: "on or off", int: "integer", float: "number"}.get(annotation, str(annotation))


def default_text(value: Any) -> str:
    """Show a default; empty if it is none, or derived as the help says."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(f"`{part}`" for part in value)
    return "" if value is None or value == () else f"`{shown(value)}`"


def bounds(field: FieldInfo) -> str:
    """Describe the range of a number; empty if it has none."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{word} {getattr(bound, key):g}"
        for bound in field.metadata
        for key, word in words.items()
        if hasattr(bound, key)
    ]
    return ", " + ", ".join(found) if found else ""


def section_lines(name: str, section: type[Section]) -> Iterator[str]:
    """Write a section: its heading and a table with a row for each field."""
    yield f"\n## {name}\n"
    yield f"{(section.__doc__ or '').strip().splitlines()[0]}\n"
    yield from table_lines(Config, section.model_fields)


def table_lines(job: type[JobConfig], fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    """Write a table with a row for each field."""
    yield "| flag | short | type | default | role | what it sets |"
    yield "|---|---|---|---|---|---|"
    for field_name, field in fields.items():
        short = described(field, "short")
        cells = [
            f"`{spelling(field_name, field)}`",
            f"`{short}`" if short else "",
            type_name(field.annotation, str(described(field, "metavar"))) + bounds(field),
            default_text(field.default),
            role_of(field),
            (field.description or "") + (f" Needs {needs}." if (needs := needed(job, field_name)) else ""),
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def offline_lines() -> Iterator[str]:
    """Write the flags of jobs on a dataset: those that all of them have, then each job's own."""
    rl, common = Config.fields(), OfflineConfig.fields()
    new = differing(common, rl)
    same = [f"`{spelling(name, field)}`" for name, field in common.items() if name not in new]
    yield "\n## Jobs on a dataset\n"
    yield f"Flags of {', '.join(f'`{job.COMMAND}`' for job in OFFLINE.values())}; see [jobs on a dataset](jobs.md).\n"
    yield from table_lines(OfflineConfig, new)
    yield textwrap.fill(
        f"\nAs above: {', '.join(same)}.", 160, replace_whitespace=False, break_long_words=False, break_on_hyphens=False
    )
    for job in OFFLINE.values():
        yield f"\n### {job.COMMAND}\n"
        yield f"{job.SUMMARY}\n"
        yield from table_lines(job, differing(job.fields(), common))


def differing(fields: Mapping[str, FieldInfo], others: Mapping[str, FieldInfo]) -> dict[str, FieldInfo]:
    """Return the fields that the others lack or have with another help or default."""
    return {name: field for name, field in fields.items() if name not in others or not is_same(field, others[name])}


def is_same(one: FieldInfo, other: FieldInfo) -> bool:
    """Return True if two fields have the same help and default."""
    return (one.description, one.default, one.annotation) == (other.description, other.default, other.annotation)


def page() -> str:
    """Return the whole page: what stands before the mark, and the tables."""
    introduction, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise SystemExit(f"{PAGE} lacks the line {MARK}")
    return (
        introduction
        + mark
        + "\n".join(
            [
                *(line for section in Config.sections().items() for line in section_lines(*section)),
                *offline_lines(),
            ]
        )
        + "\n"
    )


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare; exit status 1 if the page is out of date")
    wanted = page()
    if not parser.parse_args().check:
        PAGE.write_text(wanted, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != wanted:
        print(f"docs/{PAGE.name} is out of date: run python scripts/make_config_reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
