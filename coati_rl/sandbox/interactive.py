"""Run pieces of code one after another in one namespace, inside the sandbox, as an interactive interpreter does.

Imported by the supervisor's child alone. The value of an expression at the end of a piece is printed. As in program.py
nothing here is trusted: what the pieces print goes to files that are read from outside, and the answer to a call says
nothing that they could not say themselves.
"""

import ast
import builtins
import linecache
import os
import socket
import sys
from typing import Any

import program  # type: ignore[import-not-found]  # in this file's directory, which the supervisor adds to the path

CODE_DESCRIPTOR, CONTROL_DESCRIPTOR = 3, 4
_RECURSION_LIMIT = 10_000  # an endless recursion then takes milliseconds


def run_session() -> int:
    """Serve calls until the other end closes. Returns: the exit code."""
    program.open_streams()
    program.prepare_interpreter(os.getcwd())
    sys.setrecursionlimit(_RECURSION_LIMIT)
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    control = socket.socket(fileno=CONTROL_DESCRIPTOR)
    number, own = 0, os.getpid()
    while control.recv(16):
        number += 1
        stdout = program.open_streams()  # a call before may have closed or replaced them
        size = os.fstat(CODE_DESCRIPTOR).st_size
        source = os.pread(CODE_DESCRIPTOR, size, 0).decode(errors="replace")
        code = _run(source, f"<call {number}>", module.__dict__)
        try:
            program.flush(getattr(sys, "stdout", None))
            program.flush(stdout)
        except BaseException as error:  # noqa: BLE001 - the output is full, or is the code's own
            program.print_error(error)
            code = 1
            stdout = program.open_streams()  # the old one is freed now, not in the next call
        if os.getpid() != own:  # the code has forked; only its first process goes on with the session
            os._exit(code)
        control.send(b"1" if code else b"0")
    return 0


def _run(source: str, name: str, names: dict[str, Any]) -> int:
    """Run a piece of code. Returns: its exit code; an error is written to descriptor 2."""
    linecache.cache[name] = (len(source), None, f"{source}\n".splitlines(keepends=True), name)
    try:
        tree = ast.parse(source.removeprefix("\ufeff"), name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
            if value is not None:
                print(repr(value))  # noqa: T201 - to the session's output
    except SystemExit as exit_request:
        return int(program.exit_code(exit_request.code))
    except BaseException as error:  # noqa: BLE001 - whatever the code raises
        program.print_error(error)
        return 1
    return 0
