"""Name the files of recorded gradients: <run-dir>/gradients/steps-000001-000100.jsonl, one for every 100 steps."""

from pathlib import Path

GRADIENTS = "gradients"  # in the run directory
_STEPS_PER_FILE = 100


def gradient_file(directory: Path, step: int) -> Path:
    """Return the file that has an optimizer step, from 1."""
    first = (step - 1) // _STEPS_PER_FILE * _STEPS_PER_FILE + 1
    return directory / f"steps-{first:06d}-{first + _STEPS_PER_FILE - 1:06d}.jsonl"
