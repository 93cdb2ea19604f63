"""Say at the end of a run where its results are, by the commands that open them."""

import shlex
import shutil
import sys
from pathlib import Path

from coati_rl.checkpoint.directory import BEST_LINK, newest_complete
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.processes.run_dir import RunPaths

_NOT_SERVED = ("rm", "prm", "value")  # jobs whose models score and do not answer


def closing_lines(config: TrainingConfig, paths: RunPaths) -> list[str]:
    """Return the lines: the checkpoint (the best one with --keep-best), how to serve it, rollouts, the report."""
    best = paths.checkpoints / BEST_LINK
    checkpoint = best if best.exists() else newest_complete(paths.checkpoints)
    lines = []
    if checkpoint is not None:
        lines.append(f"checkpoint: {checkpoint}")
        if not (isinstance(config, OfflineConfig) and config.JOB in _NOT_SERVED):
            lines.append(f"serve it:   {_command('serve', checkpoint)}")
    if paths.rollouts == paths.run_dir / "rollouts" and paths.rollouts.is_dir():
        lines.append(f"rollouts:   {_command('show', paths.run_dir)}")
    return [*lines, f"report:     {_command('report', paths.run_dir)}"]


def _command(name: str, path: Path) -> str:
    """Return a command of this installation, as a shell takes it."""
    beside = Path(sys.executable).with_name("coati-rl")
    if shutil.which("coati-rl"):
        words = ["coati-rl"]
    elif beside.is_file():
        words = [str(beside)]
    else:
        words = [sys.executable, "-m", "coati_rl.command_line"]
    return shlex.join([*words, name, str(path)])
