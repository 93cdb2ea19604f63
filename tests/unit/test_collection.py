"""Test what keeps collecting fast, and what of it the fast suite runs.

There are no garbage collections on its way, and ColossalAI is left to the tests that run it.
"""

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import left_to_all

TESTS = Path(__file__).resolve().parents[1]
# The modules that import it at their top, and what is in them.
WITH_COLOSSALAI = (
    "colossalai",
    *(f"consumer.parallel.{name}" for name in ("colossal_compat", "hybrid", "shardformer_policy")),
)


def imported(statement: ast.stmt) -> Iterator[str]:
    """Return the imports of a statement: modules, or names that may be modules."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield str(statement.module)
        yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def test_the_garbage_collector_is_on_and_leaves_out_what_was_collected() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000


@pytest.mark.full
def test_no_module_of_tests_imports_colossalai_when_it_is_collected() -> None:
    found = {
        f"{path.name}: {name}"
        for path in TESTS.rglob("*.py")
        for statement in ast.parse(path.read_text("utf-8")).body
        for name in imported(statement)
        if name.startswith(WITH_COLOSSALAI)
    }
    assert not found, "it takes seconds: import it in the tests or fixtures that run it"


class Case:
    """What `left_to_all` reads of a collected case."""

    def __init__(self, nodeid: str, *marks: pytest.Mark) -> None:
        self.nodeid = nodeid
        self._marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)


def test_of_a_sampled_test_the_fast_suite_has_the_first_of_each_n_that_is_not_full() -> None:
    full, sampled = pytest.mark.full.mark, pytest.mark.sampled
    cases = [
        *(Case(f"test_cases[{number}]", sampled(2).mark, *([full] if number == 1 else [])) for number in range(5)),
        *(Case(f"test_few[{number}]", sampled(3).mark) for number in range(2)),
        *(Case("test_whole", full), Case("test_plain[0]"), Case("test_plain[1]")),
    ]
    left_out = {case.nodeid for case in left_to_all(cases)}
    assert left_out == {"test_cases[1]", "test_cases[2]", "test_cases[4]", "test_few[1]", "test_whole"}
