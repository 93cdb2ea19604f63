"""Runs a job in a process of its own and turns whatever happens there into a row: a hang or a crash is a result too.

In: a job. Out: a row. When it returns, nothing that the job started is left.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpu_checks.outcome import Figure
from gpu_checks.plan import Job

SCRIPTS = Path(__file__).resolve().parents[1]
LOG_LINES = 40  # of a check's output that a row keeps
_KILL_WAIT_S = 20.0  # a process that a driver holds on to may outlive SIGKILL for a while

Result = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What the table and the JSON say about one check."""

    check: str
    result: Result
    seconds: float | None = None  # of the whole check, its imports included
    figures: dict[str, Figure] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)  # why it failed or was not run
    log: list[str] = field(default_factory=list)  # last lines of the process's output, if it failed


def run_process(
    module: str, arguments: list[str], *, environment: dict[str, str], log: Path, deadline_s: float
) -> str | None:
    """Run `python -m module` until it ends or the deadline has passed, and kill all that it started.

    Returns: None if it ended with status 0, else what went wrong.
    """
    paths = [str(SCRIPTS.parent), str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"} | environment
    command = [sys.executable, "-m", module, *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = process.wait(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return f"not done within {deadline_s:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also stopped ones, and grandchildren after a good end
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_KILL_WAIT_S)
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return None if status == 0 else f"ended with status {status}"


def run_job(job: Job) -> Row:
    """Run a check."""
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as directory:
        job_file, result_file, log = (Path(directory) / name for name in ("job.json", "result.json", "log"))
        job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        begin = time.monotonic()
        failure = run_process(
            "gpu_checks.child",
            [str(job_file), str(result_file)],
            environment=job.environment | {"TMPDIR": directory},  # so that what a killed check leaves goes too
            log=log,
            deadline_s=job.deadline_s,
        )
        seconds = time.monotonic() - begin
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return _row(job.check, failure, _read(result_file), lines, seconds)


def _read(path: Path) -> dict[str, Any]:
    """The result; {} if the process did not get so far."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _row(check: str, failure: str | None, found: dict[str, Any], lines: list[str], seconds: float) -> Row:
    if failure is None and found.get("needs"):
        return Row(check=check, result="not run", seconds=seconds, reasons=[f"needs {found['needs']}"])
    reasons = list(found.get("problems", []))
    if failure is not None:
        said = next((line.strip() for line in reversed(lines) if line.strip()), None)
        reasons.append(failure if said is None else f"{failure}; its last words: {said}")
    elif not found:
        reasons.append("it ended without a result")
    return Row(
        check=check,
        result="failed" if reasons else "passed",
        seconds=seconds,
        figures=found.get("figures", {}),
        reasons=reasons,
        log=lines[-LOG_LINES:] if reasons else [],
    )
