"""Read JSON Lines that another process may still be writing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file's lines; none of a file that is missing.

    Lines end at line feeds alone: a text may hold other line ends. The last line is left out if it is cut off, as a
    killed run leaves it, or one that is writing.

    Raises: ConfigError naming another line that is no object.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("it is not an object")
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ConfigError(f"{path}:{number}: the line is not of a run: {error}") from error
            yield record
