"""Write step records to metrics.jsonl and TensorBoard files, and with --wandb to Weights & Biases."""

import json
import logging
import math
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from coati_rl.config.training import TrainingConfig
from coati_rl.disk import disk_errors
from coati_rl.errors import ConfigError
from coati_rl.observability.tensorboard_tags import tag_of

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"  # in the run directory


class Sink(Protocol):
    """Write complete records of numbers. Both methods raise RunError if the file cannot be written."""

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Write one record."""

    def close(self) -> None:
        """Flush and close."""


class JsonlSink:
    """Write one JSON object a line, at once: a killed run has its records up to the last step.

    A line that does not fit on the disk is taken back, so that all lines of the file are whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors(path):
            self._file = path.open("ab", buffering=0)

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Append a line; the step is in the record."""
        # JSON has neither NaN nor infinity: a reader would refuse the line.
        numbers = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        line = json.dumps(numbers, allow_nan=False).encode() + b"\n"
        with disk_errors(self._path):
            size = os.fstat(self._file.fileno()).st_size
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError:
                with suppress(OSError):
                    os.truncate(self._file.fileno(), size)
                raise

    def close(self) -> None:
        """Close the file."""
        with disk_errors(self._path):
            self._file.close()


class TensorBoardSink:
    """Write one scalar per key, in the section of its kind, to TensorBoard's event file, flushed at once.

    TensorBoard's own writer has a thread, which dies with a traceback when the disk is full; this one raises RunError.
    """

    def __init__(self, directory: Path, *, first_step: int = 0) -> None:
        """Open a new file; `first_step` of a resumed run makes later steps of earlier files void."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._path = directory / f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        with disk_errors(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter(self._path.open("wb"))
        self._add(file_version="brain.Event:2")
        if first_step:
            self._add(step=first_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Add the record's numbers."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        values = [Summary.Value(tag=tag_of(key), simple_value=value) for key, value in numbers.items()]
        self._add(step=step, summary=Summary(value=values))

    def close(self) -> None:
        """Close the file."""
        with disk_errors(self._path):
            self._writer.close()

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        with disk_errors(self._path):
            self._writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
            self._writer.flush()


class WandbSink:
    """Log to a run in the user's W&B project."""

    def __init__(self, config: TrainingConfig, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("--wandb: the package wandb is not installed; pip install wandb") from error
        try:
            self._run = wandb.init(
                project=config.run.project, name=run_dir.name, dir=str(run_dir), config=config.flat("json")
            )
        except wandb.errors.Error as error:
            message = " ".join(str(error).split())
            raise ConfigError(f"--wandb: {message} (WANDB_MODE=offline needs no account)") from error
        # W&B's own step may not decrease, but an evaluation ends after later steps have been logged.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Log the record's numbers."""
        self._run.log({"step": step} | {key: value for key, value in record.items() if value is not None})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def open_sinks(config: TrainingConfig, run_dir: Path, *, first_step: int = 0) -> list[Sink]:
    """Open the sinks of a run, which was resumed after `first_step` optimizer steps."""
    tensorboard = TensorBoardSink(run_dir / "tensorboard", first_step=first_step)
    sinks: list[Sink] = [JsonlSink(run_dir / METRICS), tensorboard]
    if config.run.wandb:
        sinks.append(WandbSink(config, run_dir))
    return sinks
