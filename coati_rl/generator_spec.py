"""Parse the name of a generator of prompts, `reasoning_gym:NAME?parameter=value&parameter=value`.

A value is JSON (a number, true, a list) or else text; a parameter that is given several times is a list. A comma and
other characters with a meaning of their own are written as in a URL (%2C). `size` is the number of rows of a set that
is read whole, and no parameter of the generator.
"""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

GENERATED = "reasoning_gym"  # the reward type of generated rows, and the task of those whose source names none
_PREFIX = f"{GENERATED}:"
DEFAULT_SIZE = 500  # rows of an evaluation set; also the package's


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorSpec:
    """Name a generator and its parameters."""

    name: str
    parameters: dict[str, Any]  # JSON values by name
    size: int | None = None  # rows of a set that is read whole

    @property
    def key(self) -> str:
        """Return a text that is the same for the same rows."""
        return json.dumps([self.name, self.parameters], sort_keys=True)


def is_generator(path: str) -> bool:
    """Return True for the name of a generator, which stands where a path may."""
    return path.startswith(_PREFIX)


def split_share(text: str) -> tuple[str, str | None]:
    """Return a generator and the text of its share; the `name=value` of a parameter has precedence over `=SHARE`."""
    name, _, share = text.rpartition("=")
    last = text.rpartition("&")[2] if "&" in text else text.partition("?")[2] or text
    needed = 2 if "?" in text else 1
    return (name, share) if last.count("=") >= needed else (text, None)


def parse_generator(path: str) -> GeneratorSpec:
    """Parse the name of a generator; that there is such a one is checked where the package is imported.

    Raises: ValueError for a text of another form.
    """
    name, mark, query = path.removeprefix(_PREFIX).partition("?")
    form = f"write {_PREFIX}NAME or {_PREFIX}NAME?PARAMETER=VALUE&PARAMETER=VALUE"
    if not name.isidentifier():
        raise ValueError(f"{path}: {name!r} names no generator; {form}")
    values: dict[str, list[Any]] = {}
    for piece in query.split("&") if mark else ():
        parameter, equals, text = piece.partition("=")
        if not equals or not parameter.isidentifier():
            raise ValueError(f"{path}: {piece!r} is no PARAMETER=VALUE; {form}")
        values.setdefault(parameter, []).append(_value(unquote(text)))
    parameters = {key: found[0] if len(found) == 1 else found for key, found in values.items()}
    if "seed" in parameters:
        raise ValueError(f"{path}: rows are made from --seed and their position; leave the parameter seed out")
    size = parameters.pop("size", None)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(f"{path}: its size is {size!r}; write the number of rows")
    return GeneratorSpec(name=name, parameters=parameters, size=size)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
