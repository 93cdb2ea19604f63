"""Read the NAME=VALUE texts of a repeated flag: a value is JSON, or text if it is none."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator

_NAMED_VALUE = re.compile(r"([A-Za-z_][\w-]*)=(.*)", re.DOTALL)


def _check_names(texts: list[str]) -> list[str]:
    """Return the texts. Raises: ValueError for one without a name, and for a name that is given twice."""
    names = []
    for text in texts:
        match = _NAMED_VALUE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no argument; write NAME=VALUE")
        names.append(match[1].replace("-", "_"))
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is given twice; give it once")
    return texts


NamedValues = Annotated[list[str], AfterValidator(_check_names)]


def named_values(texts: Sequence[str]) -> dict[str, Any]:
    """Return the values by name; hyphens of a name are underscores."""
    return {name.replace("-", "_"): _value(value) for name, _, value in (text.partition("=") for text in texts)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
