"""Say on a config field what its flag is. A flag, its default and its help exist once: here, on the field.

The long flag is the field's name with hyphens; a few keep the underscore of the reference's command line.
"""

from typing import Any

from pydantic import Field


def flag(
    default: Any,
    help_text: str,
    *,
    short: str | None = None,
    spelling: str | None = None,
    metavar: str | None = None,
    **bounds: Any,
) -> Any:
    """A pydantic field that is also a command-line flag.

    Args:
        default: the value without the flag.
        help_text: one line with the unit and what special values mean.
        short: the one-dash form, such as "-tbs".
        spelling: the long form where it is not the field's name with hyphens.
        metavar: what --help shows for the value where its type does not say enough.
        bounds: pydantic's ge, gt, le, lt.
    """
    extra: dict[str, Any] = {"short": short, "spelling": spelling, "metavar": metavar}
    return Field(default, description=help_text, json_schema_extra=extra, **bounds)
