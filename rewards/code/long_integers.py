"""Read and write JSON with integers of any length.

Python refuses to convert integers of more than 4,300 digits to and from text, since that takes quadratic time. Programs
may return such integers. They are read as Decimal here, which holds all digits, is made in linear time, and equals the
same int.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

_MAX_DIGITS = 4300  # Python's own limit


def load_json(text: str | bytes) -> Any:
    """Read JSON; an integer that is too long to be an int is a Decimal.

    Raises: ValueError, RecursionError as `json.loads`.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer that is too long
        return json.loads(text, parse_int=_integer)


def dump_json(value: Any) -> str:
    """Write what `load_json` has read; of a row, not of a program, since long integers take quadratic time."""
    with any_number_of_digits():
        return json.dumps(value, default=int)


@contextmanager
def any_number_of_digits() -> Iterator[None]:
    """Let Python convert integers of any length. For texts of a row, not of a program."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(limit)


def _integer(text: str) -> int | Decimal:
    return int(text) if len(text) <= _MAX_DIGITS else Decimal(text)
