"""Run one program once, inside the sandbox; source, input and output are in file descriptors.

Imported by the supervisor alone, which forks and calls `run_program` in the child. Nothing here is secret or trusted:
once the program runs, only the content of the descriptors after the process has ended counts.
Descriptors: 0 input, 1 output, 2 error output, 3 the returned value as JSON (call mode).
"""

import _sitebuiltins
import atexit
import builtins
import ctypes
import io
import json
import os
import re
import sys
import threading
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any

RESULT_DESCRIPTOR = 3
_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}  # links to /proc, which is empty here
# As reported to programs: pools of a process per core then work, and CPU time is summed anyway.
_NUM_CORES = 4
_RECURSION_LIMIT = 600_000  # PRIME's, verl's and LiveCodeBench's; 1,000 elsewhere. The supervisor provides the stack.
_MAX_FRAMES = 3  # of an error that are shown
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)  # as JSON writes an integer key
# Names that a solution to a function task may use without importing them, as on LeetCode, the source of APPS tests.
_FUNCTION_TASK_IMPORTS = """
from string import *
from datetime import *
from bisect import *
from collections import *
from copy import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from random import *
from statistics import *
from typing import *
from builtins import *
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, statistics
import string, sys
"""


def function_task_names() -> dict[str, Any]:
    """Return the namespace in which a solution to a function task starts."""
    names: dict[str, Any] = {}
    exec(_FUNCTION_TASK_IMPORTS, names)
    return names


def run_program(source: str, function: str, names: dict[str, Any]) -> int:
    """Run a program to its end, as `python solution.py` would.

    Args:
        source: the program; it is also in solution.py in the working directory.
        function: called after the program has run, with the arguments on descriptor 0; "" for none.
        names: the namespace to start in.
    Returns: the exit code; an error is written to descriptor 2.
    """
    stdout = open_streams()
    folder = os.getcwd()
    prepare_interpreter(folder)
    # A function task's program is not the main module: code under `if __name__ == "__main__"` would read the input.
    name = "solution" if function else "__main__"
    module = type(sys)(name)
    path = os.path.join(folder, "solution.py")
    module.__dict__.update(names, __name__=name, __file__=path, __builtins__=builtins)
    module.__dict__.pop(function, None)  # a program without a function gcd must not get math's
    sys.modules[name] = module
    code = 0
    try:
        arguments = json.load(sys.stdin, object_hook=_with_integer_keys) if function else []
        exec(compile(source.removeprefix("\ufeff"), path, "exec"), module.__dict__)
        if function:
            _call(function, arguments, module.__dict__)
    except SystemExit as exit_request:
        code = exit_code(exit_request.code)
    except BaseException as error:  # noqa: BLE001 - whatever the program raises
        print_error(error)
        code = 1
    return _end(code, module, stdout)


def open_streams() -> io.TextIOWrapper:
    """Open the standard streams on their descriptors. Returns: the output."""
    sys.stdin = _stream(io.BufferedReader(io.FileIO(0, closefd=False)), "stdin", "r")
    sys.stdout = stdout = _stream(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "stdout", "w")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
    for stream in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{stream}__", getattr(sys, stream))
    return stdout


def _stream(buffer: Any, name: str, mode: str) -> io.TextIOWrapper:
    """Return a standard stream with the interpreter's attributes; templates for fast output read its mode."""
    buffer.raw.name = f"<{name}>"
    stream = io.TextIOWrapper(buffer, "utf-8", "surrogateescape")
    stream.mode = mode  # type: ignore[misc]
    return stream


def prepare_interpreter(folder: str) -> None:
    """Add what programs expect and this interpreter lacks, as it runs without `site` and without /proc."""
    sys.argv = ["solution.py"]
    sys.path.insert(0, folder)
    sys.setrecursionlimit(_RECURSION_LIMIT)
    sys.set_int_max_str_digits(0)  # as elsewhere: no limit. A conversion that takes too long ends at that of CPU time.
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    builtins.help = _sitebuiltins._Helper()
    os.cpu_count = lambda: _NUM_CORES
    real_open = io.open

    def open_by_name(file: Any, *arguments: Any, **options: Any) -> Any:
        name = os.fspath(file) if isinstance(file, os.PathLike) else file
        descriptor = _STREAMS.get(name) if isinstance(name, str) else None
        return real_open(file if descriptor is None else os.dup(descriptor), *arguments, **options)

    builtins.open = io.open = open_by_name


def _with_integer_keys(value: dict[str, Any]) -> dict[Any, Any]:
    """Convert the keys of a JSON object to integers if all are, as PRIME's and verl's checkers do."""
    if value and all(map(_INTEGER.fullmatch, value)):
        return {int(key): part for key, part in value.items()}
    return value


def _call(function: str, arguments: list[Any], names: dict[str, Any]) -> None:
    """Call the function, or the method of class Solution, and write what it returns as JSON."""
    value = _called(function, names)(*arguments)
    try:
        text = json.dumps(value, default=_as_json)
    except TypeError:  # a key that JSON lacks; other errors are raised again
        text = json.dumps(_with_text_keys(value), default=_as_json)
    returned = text.encode()
    while returned:
        returned = returned[os.write(RESULT_DESCRIPTOR, returned) :]


def _called(function: str, names: dict[str, Any]) -> Any:
    """Return the method if class Solution has it or there is no such function; else the function."""
    solution = names.get("Solution")
    if isinstance(solution, type) and (hasattr(solution, function) or function not in names):
        return getattr(solution(), function)
    return names[function]


def _as_json(value: Any) -> object:
    """Convert types that JSON lacks: arrays, exact numbers, bytes (to text), iterables (to lists)."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="surrogateescape")
    if isinstance(value, set | frozenset):
        try:
            return sorted(value)
        except TypeError:  # of several kinds
            return sorted(value, key=repr)
    if hasattr(value, "__iter__"):
        return list(value)
    if hasattr(value, "as_integer_ratio"):  # Fraction, Decimal
        return int(value) if value == int(value) else float(value)
    raise TypeError(f"{type(value).__name__} is returned; return numbers, text, lists or dictionaries")


def _with_text_keys(value: Any) -> Any:
    """Replace keys of dictionaries that JSON lacks, such as tuples, by their text."""
    if isinstance(value, dict):
        return {_text_key(key): _with_text_keys(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(part) for part in value]
    return value


def _text_key(key: Any) -> Any:
    if key is None or isinstance(key, str | int | float):
        return key
    plain = _as_json(key) if hasattr(key, "tolist") or isinstance(key, bytes) else key
    return plain if isinstance(plain, str | int | float) else str(plain)


def exit_code(code: object) -> int:
    """Return the exit code of a SystemExit; its message is written to the error output."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def print_error(error: BaseException) -> None:
    """Write an error with its last frames to descriptor 2."""
    try:
        frames = error.__traceback__
        for _ in range(_count(frames) - _MAX_FRAMES):  # the last ones; 600,000 would take 2 s
            frames = frames.tb_next  # type: ignore[union-attr]
        if frames is error.__traceback__ and frames is not None:
            frames = frames.tb_next  # without this file's
        traceback.print_exception(type(error), error, frames, limit=-_MAX_FRAMES)
    except BaseException:  # noqa: BLE001 - a program may have replaced anything
        os.write(2, type(error).__name__.encode())


def _count(frames: TracebackType | None) -> int:
    number = 0
    while frames is not None:
        number, frames = number + 1, frames.tb_next
    return number


def _end(code: int, module: Any, stdout: Any) -> int:
    """Finish as the interpreter does: wait for threads, run exit handlers, flush, close open files."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        flush(getattr(sys, "stdout", None))
        flush(stdout)
        sys.stdout = stdout  # the program's own stream may need names that are removed next
        while module.__dict__:
            module.__dict__.popitem()  # last first: finalizers still find what they use
        flush(stdout)
        ctypes.CDLL(None).fflush(None)
    except BaseException as error:  # noqa: BLE001 - as above
        print_error(error)
        return code or 120  # the interpreter's own code for output that cannot be flushed
    return code


def flush(stream: Any) -> None:
    """Flush a stream, if it is one."""
    with suppress(AttributeError, ValueError):  # it does not exist, is closed, or detached
        stream.flush()
