"""Test what keeps collecting fast: no garbage collections on its way, and ColossalAI left to the tests that run it."""

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# The modules that import it at their top, and what is in them.
WITH_COLOSSALAI = (
    "colossalai",
    *(f"consumer.parallel.{name}" for name in ("colossal_compat", "hybrid", "shardformer_policy")),
)


def imported(statement: ast.stmt) -> Iterator[str]:
    """What a statement imports: modules, or names that may be modules."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield str(statement.module)
        yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def test_the_garbage_collector_is_on_and_leaves_out_what_was_collected() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000


def test_no_module_of_tests_imports_colossalai_when_it_is_collected() -> None:
    found = {
        f"{path.name}: {name}"
        for path in TESTS.rglob("*.py")
        for statement in ast.parse(path.read_text("utf-8")).body
        for name in imported(statement)
        if name.startswith(WITH_COLOSSALAI)
    }
    assert not found, "it takes seconds: import it in the tests or fixtures that run it"
