"""What of this project can be run on this machine's NVIDIA GPUs is run, and printed as a table.

    python scripts/gpu_check.py [--checks nccl,ipc,mfu,logprob] [--quick] [--json FILE]

nccl: the weight wire over cupy's NCCL between two processes. ipc: the same over CUDA IPC on one GPU. mfu: an optimizer
step on 16k packed tokens. logprob: the loss through the LM head at T = 32k. Each runs in a process of its own, with a
deadline; one that lacks something is "not run" and says what. Neither vLLM, Ray nor ColossalAI is needed.

Exit status: 0 if all that could run passed, 1 if a check failed, 2 without a GPU or with bad arguments.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gpu_checks.plan import CHECKS, Job, Machine, plan
from gpu_checks.runner import Row, run_job, run_process

PROBE_S = 180.0  # imports of torch, transformers and cupy, and a first CUDA call, on a cold disk


def parse_checks(text: str) -> list[str]:
    """Names between commas, in the order of `CHECKS`."""
    asked = [name.strip() for name in text.split(",")]
    unknown = [name for name in asked if name not in CHECKS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(map(repr, unknown))} unknown; there are {', '.join(CHECKS)}")
    return [name for name in CHECKS if name in asked]


def find_machine() -> Machine:
    """What the probe says; a probe that breaks or hangs has found no GPU."""
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as directory:
        log = Path(directory) / "log"
        failure = run_process("gpu_checks.probe", [], environment={}, log=log, deadline_s=PROBE_S)
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    answers = [line for line in lines if line.startswith("{")]  # a library may have the last word
    if failure is None and answers:
        return Machine(**json.loads(answers[-1]))
    said = f"; its last words: {lines[-1]}" if lines else ""
    reason = f"looking for one failed: {failure}{said}"
    return Machine(torch=None, gpus=[], no_gpu=reason, nccl=None, backends=[], unavailable={}, absent=[])


def format_machine(machine: Machine) -> str:
    """One line."""
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in machine.gpus)
    nccl = "none" if machine.nccl is None else str(machine.nccl)
    absent = f"; not installed, not needed: {', '.join(machine.absent)}" if machine.absent else ""
    return f"{gpus}; PyTorch {machine.torch}; cupy's NCCL {nccl}{absent}"


def format_table(rows: Sequence[Row]) -> str:
    """A line for each check, and one for each of its figures and reasons."""
    lines = [f"{'check':<9}{'result':<9}{'time s':>8}  figure or reason"]
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        details = [f"{name:<32}{_format_figure(value)}" for name, value in row.figures.items() if value is not None]
        details += row.reasons
        first, *others = details or [""]
        lines.append(f"{row.check:<9}{row.result:<9}{seconds:>8}  {first}".rstrip())
        lines += [f"{'':<28}{detail}" for detail in others]
    return "\n".join(lines)


def _format_figure(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_all(jobs: dict[str, Job | str]) -> list[Row]:
    """One after another: they share the GPU's memory, and its time."""
    rows = []
    for check, job in jobs.items():
        if isinstance(job, str):
            rows.append(Row(check=check, result="not run", reasons=[f"needs {job}"]))
        else:
            print(f"{check}: running, at most {job.deadline_s:g} s", file=sys.stderr, flush=True)
            rows.append(run_job(job))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Look, plan, run, print, write. Returns: the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=parse_checks, default=list(CHECKS), help=f"default: {','.join(CHECKS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all")
    parser.add_argument("--json", type=Path, help="also write machine, figures and logs of failed checks to this file")
    options = parser.parse_args(arguments)
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.resolve().parent}")
    machine = find_machine()
    if not machine.gpus:
        print(f"gpu_check: no NVIDIA GPU: {machine.no_gpu}", file=sys.stderr)
        return 2
    print(format_machine(machine), flush=True)
    rows = run_all(plan(options.checks, machine, quick=options.quick))
    print(format_table(rows))
    if options.json:
        report = {"machine": asdict(machine), "quick": options.quick, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if any(row.result == "failed" for row in rows) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
