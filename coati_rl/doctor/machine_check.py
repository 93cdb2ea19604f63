"""Define a check of the machine, and run all of them, each in a process of its own with a deadline.

A check that hangs or is killed fails by itself. Its process is the subreaper (prctl(2)) of what the check starts, Ray's
daemons for example, and kills all of it at the end.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from coati_rl.text import shorten

Status = Literal["ok", "warn", "fail"]

TOTAL_S = 55.0  # for all checks; later ones have what is left
_AT_A_TIME = 4  # checks; Ray's start waits for its processes most of the time
_LEAST_S = 1.0
_START_S = 10.0  # of a check's process, beyond its deadline
_REAP_S = 5.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Say what a check has found."""

    status: Status
    evidence: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Name a check: "module:function", imported in its own process, without arguments, returns a `Result`."""

    name: str
    function: str
    deadline_s: float = 10.0
    remedy: str = "report this with the output of coati-rl doctor --json"  # where the check itself fails


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Hold a check's name, result and time."""

    name: str
    result: Result
    seconds: float


def run_checks(checks: Sequence[Check]) -> Iterator[Line]:
    """Yield the results in the order of the checks, as they come."""
    until = time.monotonic() + TOTAL_S
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        yield from pool.map(lambda check: _run(check, until), checks)


def _run(check: Check, until: float) -> Line:
    started = time.monotonic()
    deadline_s = max(_LEAST_S, min(check.deadline_s, until - started))
    command = [sys.executable, "-m", __name__, check.function, str(deadline_s)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=deadline_s + _START_S
        )
        found = json.loads(done.stdout.decode(errors="replace").strip().split("\n")[-1] or "{}")
        if "status" in found:
            return Line(name=check.name, result=Result(**found), seconds=time.monotonic() - started)
        problem = found.get("problem") or shorten(done.stderr.decode(errors="replace")[-400:], 300)
    except subprocess.TimeoutExpired:
        problem = f"its process did not end within {deadline_s + _START_S:.0f} s"
    except ValueError:
        problem = f"no result: {shorten(done.stderr.decode(errors='replace')[-400:], 300)}"
    result = Result(status="fail", evidence=problem, remedy=check.remedy)
    return Line(name=check.name, result=result, seconds=time.monotonic() - started)


def main(arguments: Sequence[str]) -> None:
    """Run one check in a child of this process: `FUNCTION DEADLINE_S`; prints one JSON object as the last line."""
    from coati_rl.processes.ending import adopt_orphans, end_with_parent

    name, deadline_s = arguments[0], float(arguments[1])
    end_with_parent()
    adopt_orphans()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _report(name, writer)
    os.close(writer)
    try:
        text = _read(reader, time.monotonic() + deadline_s)
        status = "" if text is None else _status_of(child)
        if text is None:
            text = json.dumps({"problem": f"no answer within {deadline_s:g} s"})
        sys.stdout.write(
            "\n" + (text or json.dumps({"problem": f"its process ended without an answer{status}"})) + "\n"
        )
        sys.stdout.flush()
    finally:
        _end_descendants()


def _report(name: str, writer: int) -> None:
    """Call the check and write its result; does not return."""
    from coati_rl.errors import CoatiError
    from coati_rl.processes.ending import end_with_parent

    end_with_parent()
    module, _, function = name.partition(":")
    try:
        check: Callable[[], Result] = getattr(import_module(module), function)
        answer = asdict(check())
    except CoatiError as error:
        answer = {"status": "fail", "evidence": shorten(error, 400), "remedy": "do what the message says"}
    except Exception as error:  # noqa: BLE001, a check must not end the others
        answer = {"problem": f"{type(error).__name__}: {shorten(error, 300)}"}
    os.write(writer, json.dumps(answer).encode())
    os._exit(0)


def _read(reader: int, deadline: float) -> str | None:
    """Return what was written until the end; None at the deadline."""
    text = b""
    while (left_s := deadline - time.monotonic()) > 0:
        if select.select([reader], [], [], left_s)[0]:
            part = os.read(reader, 2**16)
            if not part or part.endswith(b"}"):  # processes that the check has left hold the pipe open
                return (text + part).decode()
            text += part
    return None


def _status_of(child: int) -> str:
    for _ in range(20):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return f", killed by {signal.Signals(-code).name}" if code < 0 else ""
        time.sleep(0.05)
    return ""


def _end_descendants() -> None:
    import psutil

    deadline = time.monotonic() + _REAP_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


if __name__ == "__main__":
    main(sys.argv[1:])
