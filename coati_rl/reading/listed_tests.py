"""Convert a list of single tests to lists of inputs and outputs.

LiveCodeBench: [{"input": text, "output": text, "testtype": "stdin"}, ...]. With "functional" a function is called; its
name is the "fn_name" of each test, or in its metadata, {"func_name": name}.
"""

import json
from contextlib import suppress
from typing import Any

from coati_rl.errors import ConfigError

_FORM = '[{"input": ..., "output": ...}, ...]'
_CALLED = ("functional", "function_call")  # the terms of LiveCodeBench and of PrimeIntellect's data


def read_listed_tests(cases: list[Any], where: str) -> dict[str, Any]:
    """Return the tests as {"inputs", "outputs"}, and "fn_name" if a function is called.

    Args:
        cases: the tests of a row.
        where: file and row, for messages.
    Raises: ConfigError for a test without input and output, a function without a name, tests of several functions.
    """
    names = set()
    for number, case in enumerate(cases, 1):
        if not isinstance(case, dict) or case.get("input") is None or case.get("output") is None:
            raise ConfigError(f"{where}: test_cases, test {number} has no input and output; write {_FORM}")
        names.add(_function(case, f"{where}: test_cases, test {number}"))
    if len(names) > 1:
        raise ConfigError(
            f"{where}: test_cases call {' and '.join(sorted(name or 'no function' for name in names))}; "
            "write a row for each function"
        )
    tests = {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
    return tests | ({"fn_name": name} if (name := "".join(names)) else {})


def _function(case: dict[str, Any], where: str) -> str:
    metadata = case.get("metadata")
    if isinstance(metadata, str):
        with suppress(ValueError, RecursionError):
            metadata = json.loads(metadata)
    name = case.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, dict) else None)
    if not name and (kind := case.get("testtype") or case.get("type")) in _CALLED:
        raise ConfigError(f'{where} is {kind} and names no function; add "fn_name": name to it')
    return name if isinstance(name, str) else ""
