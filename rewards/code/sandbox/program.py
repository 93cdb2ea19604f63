"""One run of one program, inside the sandbox: source and input flow in by descriptors, output flows out by others.

Imported by the warden alone, which forks and calls `run_program` in the child. Nothing here is secret or trusted: from
the first line of the program on, all that counts is what stands in the descriptors when the process has ended.
Descriptors: 0 input, 1 output, 2 error output, 3 the returned value as JSON (call mode).
"""

import _sitebuiltins
import atexit
import builtins
import io
import json
import os
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any

RESULT_DESCRIPTOR = 3
_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}  # by name they are in /proc, which is empty here
# What a program may believe: pools of a process per core have a place then, and CPU time is summed anyway.
_NUM_CORES = 4
# What a solution to a function task may use without importing it, as on LeetCode, whose stubs the APPS tests came from.
_FUNCTION_TASK_IMPORTS = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from copy import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from typing import *
from builtins import *
"""


def function_task_names() -> dict[str, Any]:
    """The namespace that a solution to a function task starts from."""
    names: dict[str, Any] = {}
    exec(_FUNCTION_TASK_IMPORTS, names)
    return names


def run_program(source: str, function: str, names: dict[str, Any]) -> int:
    """Run to the end, as `python solution.py` would.

    Args:
        source: the program.
        function: to be called once the program has run, with the arguments on descriptor 0; "" for none.
        names: the namespace to start from.
    Returns: the exit code; the error is on descriptor 2.
    """
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "surrogateescape")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "surrogateescape")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
    for stream in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{stream}__", getattr(sys, stream))
    _be_a_usual_interpreter()
    # A function task's program is not the main one: what stands under `if __name__ == "__main__"` would read the input.
    name = "solution" if function else "__main__"
    module = type(sys)(name)
    module.__dict__.update(names, __name__=name, __file__="/tmp/solution.py", __builtins__=builtins)
    module.__dict__.pop(function, None)  # a program without a function gcd does not have math's
    sys.modules[name] = module
    code = 0
    try:
        arguments = json.load(sys.stdin) if function else []
        exec(compile(source, "solution.py", "exec"), module.__dict__)
        if function:
            _call(function, arguments, module.__dict__)
    except SystemExit as exit_request:
        code = _exit_code(exit_request.code)
    except BaseException as error:  # noqa: BLE001 - whatever the program raises
        _print_error(error)
        code = 1
    return _end(code, module)


def _be_a_usual_interpreter() -> None:
    """What programs are used to, and this one, without `site` and without /proc, lacks."""
    sys.argv = ["solution.py"]
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    os.cpu_count = lambda: _NUM_CORES
    real_open = io.open

    def open_by_name(file: Any, *arguments: Any, **options: Any) -> Any:
        name = os.fspath(file) if isinstance(file, os.PathLike) else file
        descriptor = _STREAMS.get(name) if isinstance(name, str) else None
        return real_open(file if descriptor is None else os.dup(descriptor), *arguments, **options)

    builtins.open = io.open = open_by_name


def _call(function: str, arguments: list[Any], names: dict[str, Any]) -> None:
    """Call the function, or the method of class Solution, and write what it returns as JSON."""
    called = getattr(names["Solution"](), function) if "Solution" in names else names[function]
    returned = json.dumps(called(*arguments), default=_as_json).encode()
    while returned:
        returned = returned[os.write(RESULT_DESCRIPTOR, returned) :]


def _as_json(value: object) -> object:
    """What JSON lacks: arrays and their numbers; deques, ranges, iterators as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "__iter__"):
        return list(value)
    raise TypeError(f"{type(value).__name__} is returned; return numbers, text, lists or dictionaries")


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _print_error(error: BaseException) -> None:
    try:
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this file's
        traceback.print_exception(type(error), error, frames, limit=-3)
    except BaseException:  # noqa: BLE001 - a program may have replaced anything
        os.write(2, type(error).__name__.encode())


def _end(code: int, module: Any) -> int:
    """What the interpreter does at its end: wait for threads, run exit handlers, flush, close what was left open."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        streams: tuple[Any, ...] = (sys.stdout, sys.__stdout__)
        _flush(streams)
        while module.__dict__:
            module.__dict__.popitem()  # last first: finalizers still find what they use
        _flush(streams)
    except BaseException as error:  # noqa: BLE001 - as above
        _print_error(error)
        return code or 120  # the interpreter's own code for output that cannot be flushed
    return code


def _flush(streams: tuple[Any, ...]) -> None:
    for stream in streams:
        with suppress(AttributeError, ValueError):  # there is none; it is closed, or detached
            stream.flush()
