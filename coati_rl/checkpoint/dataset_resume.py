"""Open the checkpoint of -cp of a job on a dataset, and refuse one that does not fit before anything starts.

The rows, their order, the rows of a step and the model's shape must be those of the checkpoint. All other settings may
change; changes of those that affect the results are reported and recorded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati_rl.batching.dataset_source import DatasetSource
from coati_rl.checkpoint.directory import find_checkpoint, read_state
from coati_rl.checkpoint.resumed_run import ResumedRun, changed_settings, check_shape, date_hint, read_settings
from coati_rl.config.offline import OfflineConfig
from coati_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetResume(ResumedRun):
    """Hold a checkpoint of a job on a dataset that fits the configuration."""

    data_state: dict[str, Any]  # see `DatasetSource.data_state`, and what the coordinator adds

    @property
    def step(self) -> int:
        return int(self.data_state["step"])


def open_dataset_resume(config: OfflineConfig, source: DatasetSource | None) -> DatasetResume | None:
    """Return the resume point of -cp; None without it.

    Args:
        config: with the model as a directory.
        source: of the run from its beginning; None if the rows are not tokenised (a dry run without the model).
    Raises: ConfigError.
    """
    if config.run.checkpoint_path is None:
        return None
    directory = find_checkpoint(Path(config.run.checkpoint_path))
    where = f"--checkpoint-path {directory}"
    state = read_state(directory).get("data")
    job = state.get("job", "rl") if isinstance(state, dict) else None
    if job != config.JOB or not isinstance(state, dict):
        what = f"is a checkpoint of coati-rl {job}" if job else "holds no position in a dataset"
        raise ConfigError(f"{where}: {what}, not of {config.COMMAND}; start from its weights with --model {directory}")
    if config.run.seed != state.get("seed"):
        raise ConfigError(
            f"--seed {config.run.seed}: the run of {where} draws its rows in the order of seed {state.get('seed')}; "
            f"use --seed {state.get('seed')}"
        )
    if config.rows_per_step * config.UNIT != state.get("batch_size"):
        rows = int(state.get("batch_size", 0)) // config.UNIT
        remedy = (
            f"use -tbs {rows // config.dp}" if rows % config.dp == 0 else "use a number of trainers that divides it"
        )
        raise ConfigError(
            f"-tbs {config.parallel.train_batch_size}: tbs * dp = {config.rows_per_step} rows per step, and the run of "
            f"{where} has {rows}, by which its position counts; {remedy}"
        )
    num_steps = 0
    if source is not None:
        _check_rows(config, source.data_state(0), state, where)
        check_shape(config, directory)
        num_steps = source.num_steps
        if int(state["step"]) >= num_steps:
            raise ConfigError(
                f"--max-epochs {config.data.max_epochs}: nothing is left to do, {where} is at step {state['step']} of "
                f"{num_steps}; raise --max-epochs{'' if config.data.max_steps is None else ' or --max-steps'}"
            )
    before = read_settings(config, directory)
    changes = [before] if isinstance(before, str) else changed_settings(before, config, sizes=("rows_per_step",))
    return DatasetResume(directory=directory, num_steps=num_steps, changes=tuple(changes), data_state=state)


def _check_rows(config: OfflineConfig, here: dict[str, Any], there: dict[str, Any], where: str) -> None:
    if any(here[name] != there.get(name) for name in ("num_samples", "fingerprint")):
        numbers = f"{here['num_samples'] // config.UNIT} rows here, {there.get('num_samples', 0) // config.UNIT} there"
        raise ConfigError(
            f"--dataset {config.data.dataset}: not the rows of {where} ({numbers}, as they are tokenised)"
            f"{date_hint(config)}, so that its position in the data is not valid; use that run's --dataset, "
            "--max-length and --model, or start from the weights "
            "alone with --model"
        )
    if here["mixing"] != there.get("mixing"):
        before = "not mixed by shares" if there.get("mixing") is None else f"mixed by shares ({there['mixing']})"
        raise ConfigError(
            f"--dataset {config.data.dataset}: the sources of {where} were {before}, so that its position in the data "
            "is not valid; use that run's shares, or start from the weights alone with --model"
        )
