"""A check's own process: `python -m gpu_checks.child JOB.json RESULT.json`.

In: a job. Out: figures and problems as JSON; what was found before a check broke off is kept.
"""

import faulthandler
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coati_rl.runtime.process import die_with_parent
from gpu_checks.outcome import CheckError, Outcome

OURS = ("", "coati_rl", "consumer", "gpu_checks")  # what may not be missing


def run_check(check: str, settings: dict[str, Any], outcome: Outcome) -> None:
    """Run a check here; a check imports what it needs and no more."""
    match check:
        case "nccl" | "ipc":
            from gpu_checks.sync import SyncSettings, check_sync

            check_sync(SyncSettings(**settings), outcome)
        case "mfu":
            from gpu_checks.training import TrainingSettings, check_training

            check_training(TrainingSettings(**settings), outcome)
        case "logprob":
            from gpu_checks.logprob import LogprobSettings, check_logprob

            check_logprob(LogprobSettings(**settings), outcome)
        case _:
            raise CheckError(f"there is no check {check!r}")


def main(job_file: Path, result_file: Path) -> None:
    """Run the job, write the result."""
    die_with_parent()
    job = json.loads(job_file.read_text(encoding="utf-8"))
    # Where it hangs, into the log, before the parent kills it.
    faulthandler.dump_traceback_later(0.95 * job["deadline_s"], exit=False)
    outcome = Outcome()
    try:
        run_check(job["check"], job["settings"], outcome)
    except CheckError as error:
        outcome.problems.append(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OURS:
            raise
        outcome.needs = f"{error.name}: {error}"
    finally:
        result_file.write_text(json.dumps(asdict(outcome)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
