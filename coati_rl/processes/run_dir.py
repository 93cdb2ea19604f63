"""Create the run directory and write the resolved configuration; a resumed run may reuse the directory it had."""

import fcntl
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import prod
from pathlib import Path

from safetensors import safe_open

from coati_rl.checkpoint.directory import checkpoints_in, left_over_bytes
from coati_rl.checkpoint.resumed_run import ResumedRun
from coati_rl.checkpoint.rollback import free_name, set_aside_checkpoints, set_aside_records
from coati_rl.checkpoint.settings_files import CONFIG, keep_settings
from coati_rl.config import Config
from coati_rl.config.absolute_paths import with_absolute_paths
from coati_rl.config.kept_weights import DIRECTORY as KEPT_WEIGHTS
from coati_rl.config.lora import LoraConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.disk import check_free_space, probe
from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import ALL_LINEAR
from coati_rl.processes.machine_record import record_start
from coati_rl.yaml_text import to_yaml

logger = logging.getLogger(__name__)

_LINEAR = re.compile(r"\.\d+\.(?:.+\.)?(\w+)\.weight$")  # a layer of a decoder layer, by its last name
_BYTES_FP32 = 4 + 2 * 4  # a parameter in a checkpoint
_BYTES_BF16 = 2 + 4 + 2 * 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPaths:
    """Hold the paths that a run writes to."""

    run_dir: Path
    checkpoints: Path
    evaluation: Path
    rollouts: Path
    logs: Path


def probe_outputs(config: TrainingConfig) -> None:
    """Write a test file to each output path, before anything large is imported. Raises: ConfigError if one fails."""
    run = config.run
    if run.checkpoint_path is None:  # else the run may continue in the directory of its checkpoint
        probe(_wanted(config).parent, asked_by=f"--run-dir {_wanted(config)}")
    for flag, path in run.outputs.items():
        if path is not None:
            probe(Path(path), asked_by=f"{flag} {path}")


def checkpoint_bytes(config: TrainingConfig, precision: str) -> int:
    """Estimate a checkpoint's size: weights, AdamW's two moments, and float32 masters of bfloat16 weights.

    Of all models in it that are on this machine; a reference that moves has its weights alone.
    """
    return _saved_bytes(config, *((_BYTES_BF16, 2) if precision == "bf16" else (_BYTES_FP32, 4)))


def kept_weights_bytes(config: TrainingConfig, precision: str) -> int:
    """Estimate the size of one copy of the weights that --keep-weights writes."""
    of_weights = 2 if precision == "bf16" else 4
    return _saved_bytes(config, of_weights, of_weights)


def _saved_bytes(config: TrainingConfig, of_trained: int, of_weights: int) -> int:
    """Return the bytes of a run's models, from those of a parameter that is trained, and of one that only moves."""
    models, references = [config.model.model], list[str]()
    if isinstance(config, Config) and config.algorithm.has_critic:
        models.append(config.critic.critic_model or config.model.model)
    if isinstance(config, Config) and config.control.reference_moves is not None:
        references.append(config.model.model)
    count = partial(_num_factors, config.lora) if config.lora.is_on else _num_parameters
    return sum(map(count, models)) * of_trained + sum(map(_num_parameters, references)) * of_weights


def _num_parameters(model: str) -> int:
    return sum(prod(shape) for _, shape in _stored(model))


def _num_factors(lora: LoraConfig, model: str) -> int:
    """Return the parameters of a model's adapters: of matrices in numbered layers, which are nearly all linear."""
    targets, rank = lora.lora_targets, lora.spec.rank
    count = 0
    for name, shape in _stored(model):
        found = _LINEAR.search(name)
        if found and len(shape) == 2 and (targets == (ALL_LINEAR,) or found[1] in targets):
            count += rank * sum(shape)
    return count


def _stored(model: str) -> Iterator[tuple[str, list[int]]]:
    """Yield names and shapes of the tensors in a model's files."""
    for path in Path(model).glob("*.safetensors"):
        if not path.name.startswith("optimizer"):  # the model may be a checkpoint of a run
            with safe_open(path, framework="np") as tensors:
                for key in tensors.keys():  # noqa: SIM118, no mapping
                    yield key, tensors.get_slice(key).get_shape()


def checkpoint_directory(config: TrainingConfig) -> Path:
    """Return where a run that begins now would write its checkpoints."""
    return _paths(config, _wanted(config)).checkpoints


def make_run_dir(config: TrainingConfig, resume: ResumedRun | None = None, *, checkpoint_bytes: int = 0) -> RunPaths:
    """Create the directory; if it exists, runs/name-2, runs/name-3, ... so that two runs are never mixed.

    A run that is resumed from <run-dir>/checkpoints continues in <run-dir>, unless --run-dir names another one. Files
    written there after the checkpoint are moved to <run-dir>/discarded.

    Args:
        checkpoint_bytes: the estimated size of a checkpoint.
    Raises: ConfigError if it cannot be created or written or a checkpoint does not fit, if the run that is resumed
        is still running, or if the directory of checkpoints holds those of another run.
    """
    wanted = _wanted(config) if config.run.run_dir else None
    check_save_dir(config, resume)
    own = _directory_of_run(resume, wanted)
    checkpoints = _paths(config, own or _wanted(config)).checkpoints
    check_free_space(checkpoints, needed=checkpoint_bytes - left_over_bytes(checkpoints))
    try:
        paths = _paths(config, own or _make_new(_wanted(config)))
        with locked(paths.run_dir):
            if resume is not None:
                _discard_what_follows(resume, paths, is_same_run=own is not None)
                _note_resumption(resume, paths.run_dir)
            paths.logs.mkdir(exist_ok=True)
            resolved = with_absolute_paths(config.flat("json"))
            (paths.run_dir / CONFIG).write_text(to_yaml(resolved), encoding="utf-8")
            record_start(paths.run_dir)
    except OSError as error:
        where = error.filename or own or _wanted(config)
        raise ConfigError(f"--run-dir {where}: cannot be created: {error.strerror}") from error
    return paths


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Lock the directory for the time of the block; the system releases the lock when this process ends.

    Raises: ConfigError if another process holds it.
    """
    with (run_dir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{run_dir}: the run to be resumed is still running; end it first") from error
        except OSError as error:  # a file system without locks
            logger.warning("%s is not locked against a second run: %s", run_dir, error.strerror)
        yield


def _wanted(config: TrainingConfig) -> Path:
    run = config.run
    return (Path(run.run_dir) if run.run_dir else Path("runs") / run.project).absolute()


def check_save_dir(config: TrainingConfig, resume: ResumedRun | None) -> None:
    """Raise ConfigError for another run's directory: each would replace, or delete, the other's checkpoints."""
    run = config.run
    if run.save_dir is None:
        return
    found = checkpoints_in(Path(run.save_dir))
    if found and (resume is None or resume.directory.parent.resolve() != Path(run.save_dir).resolve()):
        raise ConfigError(
            f"--save-dir {run.save_dir}: holds checkpoints of another run, the newest of which is {found[-1].name}; "
            f"use an empty directory, or resume from them with -cp {run.save_dir}"
        )


def _directory_of_run(resume: ResumedRun | None, wanted: Path | None) -> Path | None:
    """Return the directory of the checkpoint's run, if the resumed run may continue there."""
    if resume is None or resume.directory.parent.name != "checkpoints":
        return None
    run_dir = resume.directory.parent.parent
    if not (run_dir / CONFIG).is_file():
        return None
    # The configuration of runs/name-2 holds runs/name: the number was added later.
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


def _discard_what_follows(resume: ResumedRun, paths: RunPaths, *, is_same_run: bool) -> None:
    step, checkpoints = resume.step, resume.directory.parent
    aside = free_name(paths.run_dir / "discarded" / f"after-step-{step}")
    if is_same_run:
        set_aside_records(step, aside, run_dir=paths.run_dir, rollouts=paths.rollouts, evaluation=paths.evaluation)
        set_aside_checkpoints(step, aside, checkpoints=paths.run_dir / KEPT_WEIGHTS, name=KEPT_WEIGHTS)
        keep_settings(step, aside, run_dir=paths.run_dir)
    if is_same_run or checkpoints.resolve() == paths.checkpoints.resolve():
        set_aside_checkpoints(step, aside, checkpoints=checkpoints)


def _note_resumption(resume: ResumedRun, run_dir: Path) -> None:
    record = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **resume.record()}
    with (run_dir / "resumes.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _paths(config: TrainingConfig, run_dir: Path) -> RunPaths:
    def output(flag: str, default: str) -> Path:
        own = config.run.outputs.get(flag)
        return Path(own).absolute() if own else run_dir / default

    return RunPaths(
        run_dir=run_dir,
        checkpoints=output("--save-dir", "checkpoints"),
        evaluation=output("--eval-save-dir", "eval"),
        rollouts=output("--rollout-save-dir", "rollouts"),
        logs=run_dir / "logs",
    )
