"""Move what a run wrote after step N to <run-dir>/discarded/after-step-<N> when it is resumed from step N.

The layout of the files is kept and nothing is deleted. Each file is rewritten under a temporary name and renamed, after
its discarded lines were written: a kill in between loses nothing.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from coati_rl.checkpoint.directory import checkpoints_in, step_of
from coati_rl.observability.records import step_of_record
from coati_rl.observability.step_files import GRADIENTS, TOKEN_RATIOS

_EVALUATION = re.compile(r".*-step-(\d+)\.jsonl")


def set_aside_records(step: int, aside: Path, *, run_dir: Path, rollouts: Path, evaluation: Path) -> None:
    """Restore metrics, syncs, rollouts, notes, gradients, ratios and evaluations to their content after a step."""
    for name in ("metrics.jsonl", "syncs.jsonl", "annotations.jsonl"):
        _split(run_dir / name, step, aside)
    for path in sorted(rollouts.glob("*.jsonl")):
        _split(path, step, aside / "rollouts")
    for path in sorted((run_dir / GRADIENTS).glob("*.jsonl")):
        _split(path, step, aside / GRADIENTS)
    for path in sorted((run_dir / TOKEN_RATIOS).glob("step-*.jsonl")):
        if (number := re.fullmatch(r"step-(\d+)", path.stem)) and int(number[1]) > step:
            _move(path, aside / TOKEN_RATIOS)
    for path in sorted(evaluation.glob("*.jsonl")):
        match = _EVALUATION.fullmatch(path.name)
        if match is None:
            _split(path, step, aside / "eval")
        elif int(match[1]) > step:
            _move(path, aside / "eval")


def set_aside_checkpoints(step: int, aside: Path, *, checkpoints: Path, name: str = "checkpoints") -> None:
    """Move checkpoints after a step: a later one would count as the newest, and outlive those still to be written.

    Weights that are kept for a replay are directories like them. `name`: of the directory in `aside`.
    """
    for checkpoint in checkpoints_in(checkpoints):
        if step_of(checkpoint) > step:
            _move(checkpoint, aside / name)


def free_name(path: Path) -> Path:
    """Return the path, or name-2, name-3, ... if it exists."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def _split(path: Path, step: int, aside: Path) -> None:
    """Keep the records up to a step; move the others, and a truncated line."""
    if not path.is_file() or all(_is_kept(line, step) for line in _lines(path)):
        return
    aside.mkdir(parents=True, exist_ok=True)
    rewritten = path.with_name(f".{path.name}.partial")
    with rewritten.open("w", encoding="utf-8") as kept, (aside / path.name).open("w", encoding="utf-8") as discarded:
        for line in _lines(path):
            (kept if _is_kept(line, step) else discarded).write(line)
    rewritten.replace(path)


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def _is_kept(line: str, step: int) -> bool:
    number = step_of_record(line)
    return number is not None and number <= step


def _move(path: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    shutil.move(path, directory / path.name)
