"""Run an example's script with programs in place of coati-rl and Python, which only write down how they were called.

What a later stage looks for is made: `RUN_DIR/checkpoints/step-7`, and the data that scripts/*_task.py write.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from coati_rl.config.cli import parse_job
from coati_rl.config.commands import ALL, OFFLINE
from coati_rl.config.generate import GenerateConfig
from coati_rl.config.generate_rules import check_generate
from coati_rl.config.offline_rules import check_offline
from coati_rl.config.rules import check

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ENVIRONMENT = """
REPOSITORY="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPOSITORY/.venv"
PYTHON="$VENV/bin/python"
DEVICE=cpu
"""
# Appends its arguments as one line, separated by tabs; fails if they have the word in the file `fail`.
PROGRAM = """#!/usr/bin/env bash
(IFS=$'\\t'; printf '%s\\n' "${0##*/}"$'\\t'"$*" >>calls)
if [[ -f fail && "$*" == *"$(cat fail)"* ]]; then echo "the reason"; exit 7; fi
if [[ ${1-} == scripts/*_task.py ]]; then exec "$REAL_PYTHON" "$REAL_SCRIPTS/${1##*/}" "${@:2}"; fi
if [[ ${@: -2:1} == --run-dir ]]; then mkdir -p "${@: -1}/checkpoints/step-7"; fi
"""
Call = list[str]  # program, then its arguments


def make_repository(root: Path, *names: str) -> Path:
    """Return `root` with copies of scripts and the recording programs."""
    (root / "scripts").mkdir()
    (root / ".venv" / "bin").mkdir(parents=True)
    for name in (*names, "stages.sh"):
        shutil.copy(SCRIPTS / name, root / "scripts")
    (root / "scripts" / "environment.sh").write_text(ENVIRONMENT)
    for name in ("python", "coati-rl"):
        program = root / ".venv" / "bin" / name
        program.write_text(PROGRAM)
        program.chmod(0o755)
    return root


def run_script(repository: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository; its code and output are the caller's to look at."""
    environment = {"REAL_PYTHON": sys.executable, "REAL_SCRIPTS": str(SCRIPTS), "PYTHONPATH": str(SCRIPTS.parent)}
    return subprocess.run(
        [repository / "scripts" / name, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def recorded_calls(repository: Path) -> list[Call]:
    """Return the calls of the programs, the first one first."""
    return [line.split("\t") for line in (repository / "calls").read_text().splitlines()]


def check_job(job: str, arguments: Sequence[str]):
    """Parse and check a command as coati-rl does, and return its config."""
    config, _ = parse_job(arguments, ALL[job])
    if isinstance(config, GenerateConfig):
        check_generate(config)
    else:
        check_offline(config) if job in OFFLINE else check(config)
    return config


def inputs(config) -> set[Path]:
    """Return the models and files that a command reads."""
    values = config.flat()
    evaluation = values.get("eval_dataset") or {}
    reward = str(values.get("reward_type", "")).partition("model:")[2].rpartition("=")[0]
    found = [values["model"], values["dataset"], *evaluation.values(), values.get("teacher")]
    if reward:  # its directory is absolute from here on
        found.append(str(Path(reward).relative_to(Path.cwd())))
    return {Path(each) for each in found if each}
