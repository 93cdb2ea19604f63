"""Keep the settings that wrote a run's checkpoints: config.yaml is that of the last resumption, which may have others.

After a resumption from step N in the run's directory config-step-N.yaml has those that wrote checkpoint N, and any
other one after the resumption before. Further config.yaml of before a resumption are config-step-N-2.yaml, ...
"""

import re
import shutil
from pathlib import Path

from coati_rl.checkpoint.directory import step_of
from coati_rl.checkpoint.rollback import free_name

CONFIG = "config.yaml"  # in the run directory
_KEPT = re.compile(r"config-step-(\d+)(-\d+)?\.yaml")


def settings_file(checkpoint: Path) -> Path:
    """Return the file of the settings that wrote a checkpoint; it may not exist."""
    return settings_of_step(step_of(checkpoint), checkpoint.parent.parent)


def keep_settings(step: int, aside: Path, *, run_dir: Path) -> None:
    """Keep config.yaml before a resumption from a step; what was kept of later steps, which are void, goes aside."""
    kept = run_dir / f"config-step-{step}.yaml"
    if (path := settings_of_step(step, run_dir)) not in (kept, run_dir / CONFIG):
        shutil.copy(path, kept)
    shutil.copy(run_dir / CONFIG, free_name(kept))
    for number, path in _kept(run_dir):
        if number > step:
            aside.mkdir(parents=True, exist_ok=True)
            shutil.move(path, aside / path.name)


def settings_of_step(step: int, run_dir: Path) -> Path:
    """Return the file of the settings that an optimizer step was trained with, and its checkpoint written."""
    later = [number for number, _ in _kept(run_dir) if number >= step]
    return run_dir / (f"config-step-{min(later)}.yaml" if later else CONFIG)


def _kept(run_dir: Path) -> list[tuple[int, Path]]:
    names = [path.name for path in run_dir.iterdir()] if run_dir.is_dir() else []
    return [(int(match[1]), run_dir / match[0]) for name in names if (match := _KEPT.fullmatch(name))]
