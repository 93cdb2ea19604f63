"""Name files of records, 100 optimizer steps each, and delete those that are not kept: of rollouts and of gradients."""

import re
from pathlib import Path

GRADIENTS = "gradients"  # in the run directory
TOKEN_RATIOS = "token_ratios"  # likewise, a file a step, where a replay has written it
STEPS_PER_FILE = 100
_NAME = re.compile(r"steps-(\d+)-(\d+)\.jsonl")


def step_file(directory: Path, step: int) -> Path:
    """Return the file that has an optimizer step, from 1."""
    first = (step - 1) // STEPS_PER_FILE * STEPS_PER_FILE + 1
    return directory / f"steps-{first:06d}-{first + STEPS_PER_FILE - 1:06d}.jsonl"


def steps_in(file: Path) -> range | None:
    """Return the steps that a file may have by its name; None if it is of something else."""
    found = _NAME.fullmatch(file.name)
    return range(int(found[1]), int(found[2]) + 1) if found else None


def delete_before(directory: Path, step: int, *, keep: int | None) -> None:
    """Delete the files that have none of the last `keep` steps up to `step`; None: all are kept."""
    for file in () if keep is None else directory.glob("steps-*.jsonl"):
        steps = steps_in(file)
        if steps and steps[-1] <= step - (keep or 0):
            file.unlink(missing_ok=True)
