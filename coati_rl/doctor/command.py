"""Check this machine, or name the causes of what a run shows: `coati-rl doctor [RUN]`.

Exit code: 0 if nothing is wrong, 1 if a check fails or a cause was found, 2 for a directory that is none of a run.
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coati_rl import __version__
from coati_rl.doctor.diagnosis import diagnose
from coati_rl.doctor.machine_check import Check, run_checks
from coati_rl.doctor.rule import Finding
from coati_rl.doctor.run_data import RunData, read_run
from coati_rl.errors import CoatiError, ConfigError
from coati_rl.text import count, printable

_PROG = "coati-rl doctor"
_HERE = "coati_rl.doctor"
# Ray's start first: it takes the longest, and the others go on beside it.
CHECKS = (
    Check(name="ray", function=f"{_HERE}.services:ray", deadline_s=40.0,
          remedy="see docs/install.md; a job on a dataset on one machine needs no Ray"),
    Check(name="packages", function=f"{_HERE}.host:packages"),
    Check(name="cores", function=f"{_HERE}.host:cores"),
    Check(name="memory", function=f"{_HERE}.host:memory"),
    Check(name="shared memory", function=f"{_HERE}.host:shared_memory"),
    Check(name="disk", function=f"{_HERE}.host:disk", remedy="the disk does not answer: use --run-dir elsewhere"),
    Check(name="temporary", function=f"{_HERE}.host:temporary_directory", remedy="export TMPDIR=/tmp"),
    Check(name="loopback", function=f"{_HERE}.host:loopback", remedy="check the interface lo and the firewall"),
    Check(name="sandbox", function=f"{_HERE}.services:sandbox", deadline_s=20.0),
    Check(name="GPU driver", function=f"{_HERE}.gpus:driver", deadline_s=30.0, remedy="see nvidia-smi"),
    Check(name="GPU NCCL", function=f"{_HERE}.gpus:nccl", deadline_s=40.0,
          remedy="see NCCL's output (NCCL_DEBUG=INFO); --weight-transport gloo"),
    Check(name="GPU IPC", function=f"{_HERE}.gpus:ipc", deadline_s=40.0, remedy="--weight-transport nccl or shm"),
    Check(name="GPU gradient", function=f"{_HERE}.gpus:gradient", deadline_s=40.0),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__.partition("\n")[0])
    parser.add_argument(
        "run", type=Path, nargs="?", help="directory of a run or a job; without it the machine is checked"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for bug reports")
    given = parser.parse_args(arguments)
    try:
        return _check_machine(as_json=given.json) if given.run is None else _check_run(given.run, as_json=given.json)
    except BrokenPipeError:  # of a pager that was closed
        sys.stderr.close()
        return 1
    except CoatiError as error:
        sys.stderr.write(f"{_PROG}: {error}\n")
        return 2


def _check_machine(*, as_json: bool) -> int:
    lines = []
    for line in run_checks(CHECKS):
        lines.append(line)
        if not as_json:
            remedy = f"\n      remedy: {line.result.remedy}" if line.result.remedy else ""
            _print(f"{line.result.status:<5} {line.name:<13} {line.result.evidence}{remedy}")
    has_failed = any(line.result.status == "fail" for line in lines)
    if as_json:
        _print_json(
            {
                "checks": [
                    {"name": each.name, **asdict(each.result), "seconds": round(each.seconds, 2)} for each in lines
                ]
            }
        )
    return int(has_failed)


def _check_run(directory: Path, *, as_json: bool) -> int:
    try:
        run = read_run(directory)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or directory}: cannot be read: {error.strerror}; read the run as the user who started it"
        ) from error
    findings = diagnose(run)
    if as_json:
        _print_json({"run": _facts(run), "findings": [asdict(each) for each in findings]})
    else:
        for text in _text_of(run, findings):
            _print(text)
    return int(bool(findings))


def _facts(run: RunData) -> dict[str, Any]:
    return {"steps": run.num_steps, "is_running": run.is_running, "rollouts_read": len(run.first_rollouts)}


def _text_of(run: RunData, findings: Sequence[Finding]) -> list[str]:
    state = "running" if run.is_running else "not running"
    if not findings:
        return [f"nothing found in {count(run.num_steps, 'step')} ({state})"]
    lines = []
    for number, each in enumerate(findings, 1):
        after = f" (follows from {', '.join(each.follows_from)})" if each.follows_from else ""
        lines += [f"{number}. {each.says} [{each.cause}]{after}", f"   evidence: {each.evidence}"]
        lines += [] if each.follows_from else [f"   remedy:   {each.remedy}"]
    return lines


def _print(text: str) -> None:
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


def _print_json(found: dict[str, Any]) -> None:
    about = {"coati_rl": __version__, "python": platform.python_version(), "system": platform.platform()}
    sys.stdout.write(json.dumps(about | found, indent=1) + "\n")
