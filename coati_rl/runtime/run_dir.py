"""The run directory, with the resolved configuration in it: made new for every run, except for one that goes on from a
checkpoint of its own.
"""

import fcntl
import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path

import yaml
from safetensors import safe_open

from coati_rl.checkpoint.directory import checkpoints_in, left_over_bytes
from coati_rl.checkpoint.resume import ResumePoint
from coati_rl.checkpoint.rollback import free_name, set_aside_checkpoints, set_aside_records
from coati_rl.config import Config
from coati_rl.disk import check_free_space, probe
from coati_rl.errors import ConfigError

logger = logging.getLogger(__name__)

_BYTES_FP32 = 4 + 2 * 4  # a parameter in a checkpoint
_BYTES_BF16 = 2 + 4 + 2 * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPaths:
    """Describe where a run writes."""

    run_dir: Path
    checkpoints: Path
    evaluation: Path
    rollouts: Path
    logs: Path


def probe_outputs(config: Config) -> None:
    """Try to write where the run will, before anything large is imported. Raises: ConfigError if a disk refuses."""
    run = config.run
    if run.checkpoint_path is None:  # else the run may go on in its own directory, wherever that is
        probe(_wanted(config).parent, asked_by=f"--run-dir {_wanted(config)}")
    outputs = {
        "--save-dir": run.save_dir,
        "--eval-save-dir": run.eval_save_dir,
        "--rollout-save-dir": run.rollout_save_dir,
    }
    for flag, path in outputs.items():
        if path is not None:
            probe(Path(path), asked_by=f"{flag} {path}")


def checkpoint_bytes(model: Path, precision: str) -> int:
    """Estimate what a checkpoint takes: weights, AdamW's two moments, and float32 masters of bfloat16 weights."""
    num_parameters = 0
    for path in model.glob("*.safetensors"):
        if not path.name.startswith("optimizer"):  # the model may be a checkpoint of ours
            with safe_open(path, framework="np") as tensors:
                num_parameters += sum(prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    return num_parameters * (_BYTES_BF16 if precision == "bf16" else _BYTES_FP32)


def make_run_dir(config: Config, resume: ResumePoint | None = None, *, checkpoint_bytes: int = 0) -> RunPaths:
    """Create the directory; where one exists, runs/name-2, runs/name-3, ... so that two runs are never mixed.

    A run that is resumed from <run-dir>/checkpoints goes on in <run-dir>, unless --run-dir is another one. What was
    written there after the checkpoint moves to <run-dir>/discarded.

    Args:
        checkpoint_bytes: what a checkpoint will take.
    Raises: ConfigError if it cannot be created or written or has no room for a checkpoint, if the run that is resumed
        is still going on, or if the directory of checkpoints holds those of another run.
    """
    wanted = _wanted(config) if config.run.run_dir else None
    _check_save_dir(config, resume)
    own = _directory_of_run(resume, wanted)
    checkpoints = _paths(config, own or _wanted(config)).checkpoints
    check_free_space(checkpoints, needed=checkpoint_bytes - left_over_bytes(checkpoints))
    try:
        paths = _paths(config, own or _make_new(_wanted(config)))
        with held(paths.run_dir):
            if resume is not None:
                _discard_what_follows(resume, paths, is_same_run=own is not None)
                _note_resumption(resume, paths.run_dir)
            paths.logs.mkdir(exist_ok=True)
            resolved = config.flat("json")
            (paths.run_dir / "config.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--run-dir {error.filename or wanted}: cannot be created: {error.strerror}") from error
    return paths


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Let no other process write here meanwhile; the system lets go when this one ends, however it ends.

    Raises: ConfigError if another process holds it.
    """
    with (run_dir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{run_dir}: the run that is to be resumed is still going on; end it first") from error
        except OSError as error:  # a file system without locks
            logger.warning("%s is not locked against a second run: %s", run_dir, error.strerror)
        yield


def _wanted(config: Config) -> Path:
    run = config.run
    return (Path(run.run_dir) if run.run_dir else Path("runs") / run.project).absolute()


def _check_save_dir(config: Config, resume: ResumePoint | None) -> None:
    """Two runs in one directory would replace, and with --keep-checkpoints delete, each other's checkpoints."""
    run = config.run
    if run.save_dir is None:
        return
    found = checkpoints_in(Path(run.save_dir))
    if found and (resume is None or resume.directory.parent.resolve() != Path(run.save_dir).resolve()):
        raise ConfigError(
            f"--save-dir {run.save_dir}: holds checkpoints of another run, the newest of which is {found[-1].name}; "
            f"use an empty directory, or go on from them with -cp {run.save_dir}"
        )


def _directory_of_run(resume: ResumePoint | None, wanted: Path | None) -> Path | None:
    """The directory of the run that the checkpoint belongs to, if the resumed run may go on there."""
    if resume is None or resume.directory.parent.name != "checkpoints":
        return None
    run_dir = resume.directory.parent.parent
    if not (run_dir / "config.yaml").is_file():
        return None
    # The configuration of runs/name-2 says runs/name: the directory was numbered after it.
    is_wanted = wanted is None or (
        wanted.parent.resolve() == run_dir.parent.resolve()
        and re.fullmatch(rf"{re.escape(wanted.name)}(-\d+)?", run_dir.name)
    )
    return run_dir if is_wanted else None


def _make_new(wanted: Path) -> Path:
    for number in range(1, 10_000):
        run_dir = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            continue
        return run_dir
    raise ConfigError(f"--run-dir {wanted}: ten thousand runs have this name; use another one")


def _discard_what_follows(resume: ResumePoint, paths: RunPaths, *, is_same_run: bool) -> None:
    step, checkpoints = resume.position.step, resume.directory.parent
    aside = free_name(paths.run_dir / "discarded" / f"after-step-{step}")
    if is_same_run:
        set_aside_records(step, aside, run_dir=paths.run_dir, rollouts=paths.rollouts, evaluation=paths.evaluation)
        shutil.copy(paths.run_dir / "config.yaml", free_name(paths.run_dir / f"config-step-{step}.yaml"))
    if is_same_run or checkpoints.resolve() == paths.checkpoints.resolve():
        set_aside_checkpoints(step, aside, checkpoints=checkpoints)


def _note_resumption(resume: ResumePoint, run_dir: Path) -> None:
    record = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **resume.record()}
    with (run_dir / "resumes.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _paths(config: Config, run_dir: Path) -> RunPaths:
    run = config.run
    return RunPaths(
        run_dir=run_dir,
        checkpoints=Path(run.save_dir).absolute() if run.save_dir else run_dir / "checkpoints",
        evaluation=Path(run.eval_save_dir).absolute() if run.eval_save_dir else run_dir / "eval",
        rollouts=Path(run.rollout_save_dir).absolute() if run.rollout_save_dir else run_dir / "rollouts",
        logs=run_dir / "logs",
    )
