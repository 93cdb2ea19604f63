"""Rehearse commands that fail late, and good ones; count what `coati-rl rehearse` stops and what it refuses wrongly.

    python scripts/bench/rehearsal_matrix.py --model tiny-model --out matrix [--only TEXT] [--table table.md]

One line of JSON a case goes to OUT/results.jsonl as soon as it is known; cases that have one are not repeated.
"""

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rehearsal_cases import FAILING, GOOD, Case
from rehearsal_files import write_files

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 1500


def rehearse(case: Case, files: Path, model: Path, limit_s: float) -> dict[str, Any]:
    """Return what a rehearsal found, and how long it took."""
    words = shlex.split(case.flags.replace("{f}", str(files)).replace("{m}", str(model)))
    options = ["--json", "--limit-s", str(limit_s), *shlex.split(case.options)]
    command = [sys.executable, "-m", "coati_rl.command_line", "rehearse", case.job, *options, *words]
    if "--run-dir" not in words:
        command += ["--run-dir", str(files / "never-written")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    seconds, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        stages = json.loads(done.stdout)["stages"]
    except (ValueError, KeyError):
        stages = [{"name": "?", "outcome": "failed", "problem": done.stderr[-2000:], "warnings": []}]
    last = stages[-1]
    message = last["problem"].replace(str(files), "FILES").replace(str(model), "MODEL")
    return {
        "name": case.name,
        "job": case.job,
        "is_good": not case.named,
        "exit_code": done.returncode,
        "stage": last["name"] if done.returncode else "",
        "message": message,
        "is_named": all(text.lower() in last["problem"].lower() for text in case.named),
        "seconds": round(seconds, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "load": os.getloadavg()[0],
        "stages": {each["name"]: round(each.get("seconds", 0.0), 1) for each in stages},
        "left_behind": (files / "never-written").exists(),
    }


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page's table."""
    yield "| command | exit | stage | says | s |"
    yield "|---|---|---|---|---|"
    for each in results:
        says = each["message"].splitlines()[0] if each["message"] else "nothing stops it"
        says = says if len(says) <= 180 else says[:177] + "..."
        says = says.replace("|", "\\|").replace("<", "&lt;")
        yield f"| {each['name']} | {each['exit_code']} | {each['stage']} | {says} | {each['seconds']:.0f} |"


def summary(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the counts and the times."""
    for is_good in (False, True):
        found = [each for each in results if each["is_good"] == is_good]
        if not found:
            continue
        seconds = sorted(each["seconds"] for each in found)
        stopped = [each for each in found if each["exit_code"]]
        named = sum(each["is_named"] for each in stopped)
        early = sum(each["stage"] in ("flags", "preparation") for each in stopped)
        kind = "good" if is_good else "failing"
        yield (
            f"{len(found)} {kind}: {len(stopped)} stopped ({named} with the cause named, {early} by a run's own "
            f"preparation); seconds: median {statistics.median(seconds):.0f}, maximum {seconds[-1]:.0f}; "
            f"CPU seconds: median {statistics.median(each['cpu_s'] for each in found):.0f}; mean load "
            f"{statistics.mean(each['load'] for each in found):.1f}"
        )


def main() -> None:
    """Run the cases that have no result yet, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of scripts/make_tiny_model.py")
    parser.add_argument("--out", type=Path, required=True, help="directory for files and results")
    parser.add_argument("--only", default="", help="cases whose name holds this text; good or failing: all of a kind")
    parser.add_argument("--limit-s", type=float, default=120.0, help="as of coati-rl rehearse")
    parser.add_argument("--table", type=Path, help="write the page's table to this file")
    given = parser.parse_args()
    files, model, path = given.out.absolute() / "files", given.model.absolute(), given.out / "results.jsonl"
    write_files(files, model)
    known = [json.loads(line) for line in path.read_text().split("\n") if line] if path.is_file() else []
    chosen = {"good": GOOD, "failing": FAILING}.get(given.only) or [
        case for case in (*FAILING, *GOOD) if given.only in case.name
    ]
    for case in chosen:
        if any(each["name"] == case.name for each in known):
            continue
        result = rehearse(case, files, model, given.limit_s)
        known.append(result)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        verdict = "ok" if (result["exit_code"] == 0) == result["is_good"] and result["is_named"] else "WRONG"
        print(
            f"{verdict:<6}{result['seconds']:6.1f} s  {case.name}: {result['stage']}: {result['message'][:200]}",
            flush=True,
        )
    order = {case.name: number for number, case in enumerate((*FAILING, *GOOD))}
    results = sorted((each for each in known if each["name"] in order), key=lambda each: order[each["name"]])
    print("\n".join(summary(results)))
    if given.table:
        given.table.write_text("\n".join(table(results)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
