"""Rehearse commands that fail late, and good ones; count what `coati-rl rehearse` stops and what it refuses wrongly.

    python scripts/bench/rehearsal_matrix.py --model tiny-model --out matrix [--only TEXT] [--table table.md]

One line of JSON a case goes to OUT/results.jsonl as soon as it is known; cases that have one are not repeated.
Libraries are imported once, and each rehearsal is a fork of this process: its seconds are without those of the
preparation's imports.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from rehearsal_cases import FAILING, GOOD, Case
from rehearsal_files import write_files


def rehearse(case: Case, files: Path, model: Path, limit_s: float) -> dict[str, Any]:
    """Return what a rehearsal found, and how long it took; it is called in a fork of this process."""
    words = shlex.split(case.flags.replace("{f}", str(files)).replace("{m}", str(model)))
    options = ["--json", "--limit-s", str(limit_s), *shlex.split(case.options)]
    if "--run-dir" not in words:
        words += ["--run-dir", str(files / "never-written")]
    begin = time.monotonic()
    code, output, errors = _called([case.job, *options, *words])
    seconds = time.monotonic() - begin
    try:
        stages = json.loads(output)["stages"]
    except (ValueError, KeyError):
        stages = [{"name": "?", "outcome": "failed", "problem": errors[-2000:], "warnings": []}]
    last = stages[-1]
    return {
        "name": case.name,
        "job": case.job,
        "is_good": not case.named,
        "exit_code": code,
        "stage": last["name"] if code else "",
        "message": last["problem"].replace(str(files), "FILES").replace(str(model), "MODEL"),
        "is_named": all(text.lower() in last["problem"].lower() for text in case.named),
        "seconds": round(seconds, 1),
        "load": round(os.getloadavg()[0], 1),
        "stages": {each["name"]: round(each.get("seconds", 0.0), 1) for each in stages},
        "left_behind": (files / "never-written").exists(),
    }


def preload() -> float:
    """Import what every preparation imports, so that forks need not. Returns: seconds."""
    begin = time.monotonic()
    for name in (
        *("torch", "transformers", "rl_example", "consumer.__main__", "coati_rl.preflight.prepare"),
        *("coati_rl.preflight.prepare_offline", "coati_rl.rehearsal.preparation", "consumer.proofs.model"),
        *("consumer.parallel.layout_rules", "producer.made_environment", "rewards.tried_rows"),
    ):
        import_module(name)
    return time.monotonic() - begin


def _called(arguments: list[str]) -> tuple[int, str, str]:
    """Call `coati-rl rehearse` in a fork. Returns: exit code, standard output, standard error."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            os._exit(_code_of(arguments))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return code, texts[0], texts[1]


def _code_of(arguments: list[str]) -> int:
    from coati_rl.rehearsal.command import main as rehearse_command

    try:
        return rehearse_command(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()


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
            f"mean load of the machine {statistics.mean(each['load'] for each in found):.1f}"
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
    print(f"imports {preload():.1f} s", flush=True)
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
