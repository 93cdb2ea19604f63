"""Read the paths of -d and -ed, which may have names: PATH, NAME=PATH for each of several, or a JSON object."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError

_NAMED = re.compile(r"([A-Za-z0-9][\w.+-]*)=(.+)", re.DOTALL)


def read_paths(flag: str, texts: Sequence[str], *, needs_names: bool) -> Any:
    """Return what the values of a flag, in order, come to: one path, or paths by name (of JSON, whatever it holds).

    An existing file whose own path has the form NAME=PATH is a path. A later plain path takes the place of an earlier
    one, as with any other flag.

    Args:
        flag: for messages.
        texts: at least one.
        needs_names: one path without a name is refused.
    Raises: ConfigError for a name that is given twice, and for paths with and without names.
    """
    last = texts[-1]
    if last.startswith(("{", "[") if needs_names else "{"):
        try:
            return json.loads(last)
        except json.JSONDecodeError as error:
            raise ConfigError(f"""{flag} {last!r}: not JSON ({error}); write '{{"task": "path.jsonl"}}'""") from error
    named: dict[str, str] = {}
    for text in texts:
        match = None if Path(text).expanduser().exists() else _NAMED.fullmatch(text)
        if match is None:
            continue
        if match[1] in named:
            raise ConfigError(f"{flag} {text}: {match[1]} is named twice; give one file for each name")
        named[match[1]] = match[2]
    if not named and not needs_names:
        return last
    if len(named) < len(texts):
        raise ConfigError(
            f"{flag} {' '.join(texts)}: give every path a name, NAME=PATH{'' if needs_names else ', or one path alone'}"
        )
    return named
