"""Read numbers of the flags of commands that have no configuration; argparse adds the flag's name to the messages."""

import argparse
import math
from collections.abc import Callable


def positive(text: str) -> float:
    """Return a finite number above 0. Raises: argparse.ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return number


def integer_from(least: int) -> Callable[[str], int]:
    """Return what reads a whole number from `least` on, and raises argparse.ArgumentTypeError for others."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from {least} on")
        return number

    return read
