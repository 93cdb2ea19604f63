"""Where step records go: metrics.jsonl always, TensorBoard files always, Weights & Biases when asked."""

import json
import logging
import math
from pathlib import Path
from typing import IO, Any, Protocol

from coati_rl.config import Config
from coati_rl.errors import ConfigError

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes complete records; numbers only."""

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush."""


class JsonlSink:
    """One object a line, flushed at once: a run that is killed has its record up to the last step."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Append a line; the step is in the record."""
        # JSON has neither NaN nor infinity: a reader would refuse the line.
        numbers = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(numbers, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """One scalar per key."""

    def __init__(self, directory: Path, *, first_step: int = 0) -> None:
        """`first_step`: of a run that is resumed; what an earlier file says of later steps is void."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step + 1 if first_step else None)

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Add the record's numbers."""
        for key, value in record.items():
            if isinstance(value, int | float) and key != "step":
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class WandbSink:
    """A run in the user's W&B project."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("--wandb: the package wandb is not installed; pip install wandb") from error
        try:
            self._run = wandb.init(
                project=config.project, name=run_dir.name, dir=str(run_dir), config=config.model_dump(mode="json")
            )
        except wandb.errors.Error as error:
            message = " ".join(str(error).split())
            raise ConfigError(f"--wandb: {message} (WANDB_MODE=offline needs no account)") from error
        # Its own step may not go back, but an evaluation ends after later steps have been logged.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Log the record's numbers."""
        self._run.log({"step": step} | {key: value for key, value in record.items() if value is not None})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def open_sinks(config: Config, run_dir: Path, *, first_step: int = 0) -> list[Sink]:
    """The sinks of a run; `first_step` optimizer steps are behind it when it is resumed."""
    tensorboard = TensorBoardSink(run_dir / "tensorboard", first_step=first_step)
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl"), tensorboard]
    if config.wandb:
        sinks.append(WandbSink(config, run_dir))
    return sinks
