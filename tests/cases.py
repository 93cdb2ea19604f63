"""Mark cases of a test that the fast suite leaves to --all, where some cases of it kill a mutant."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def one_of(number: int, *values: Iterable[Any]) -> list[Any]:
    """Return values, or the product of several; of each `number` in their order the fast suite has the first."""
    cases = [*values[0]] if len(values) == 1 else [*itertools.product(*values)]
    arguments = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*each, marks=pytest.mark.full if place % number else ()) for place, each in enumerate(arguments)
    ]
