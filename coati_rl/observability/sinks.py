"""Write step records and sampled answers to metrics.jsonl, TensorBoard files, and with --wandb to Weights & Biases."""

import json
import logging
import math
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from coati_rl.config.training import TrainingConfig
from coati_rl.disk import disk_errors
from coati_rl.errors import ConfigError
from coati_rl.observability.sampled_answer import SampledAnswer
from coati_rl.observability.tensorboard_tags import tag_of

logger = logging.getLogger(__name__)

METRICS, SYNCS = "metrics.jsonl", "syncs.jsonl"  # in the run directory
_WANDB_ID = "wandb-id.txt"  # there, too
_ANSWERS = "sampled_answer"  # a chart's tag


class Sink(Protocol):
    """Write complete records of numbers, and answers. All methods raise RunError if the file cannot be written."""

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Write one record."""

    def write_answer(self, step: int, answer: SampledAnswer) -> None:
        """Write an answer that is shown with the record of a step."""

    def close(self, *, has_failed: bool = False) -> None:
        """Flush and close; `has_failed`: the run did not come to its end."""


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

    def write_answer(self, step: int, answer: SampledAnswer) -> None:
        """Do nothing: rollouts have files of their own."""

    def close(self, *, has_failed: bool = False) -> None:
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

    def write_answer(self, step: int, answer: SampledAnswer) -> None:
        """Add the answer as text, which TensorBoard renders as Markdown: its lines are those of a code block."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto

        text = "\n".join(f"{name}: {value}" for name, value in answer.fields().items())
        block = "".join(f"    {line}\n" for line in text.split("\n")).encode()
        value = Summary.Value(
            tag=f"rollouts/{_ANSWERS}",
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(dtype="DT_STRING", string_val=[block]),
        )
        self._add(step=step, summary=Summary(value=[value]))

    def close(self, *, has_failed: bool = False) -> None:
        """Close the file."""
        with disk_errors(self._path):
            self._writer.close()

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        with disk_errors(self._path):
            self._writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
            self._writer.flush()


class WandbSink:
    """Log to a run in the user's W&B project; one that goes on in its directory goes on there, by its id."""

    def __init__(self, config: TrainingConfig, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("--wandb: the package wandb is not installed; pip install wandb") from error
        self._table = wandb.Table
        try:
            self._run = wandb.init(
                project=config.run.project,
                name=run_dir.name,
                dir=str(run_dir),
                config=config.flat("json"),
                id=_wandb_id(run_dir / _WANDB_ID),
                resume="allow",
            )
        except wandb.errors.Error as error:
            message = " ".join(str(error).split())
            raise ConfigError(f"--wandb: {message} (WANDB_MODE=offline needs no account)") from error
        # W&B's own step may not decrease, but an evaluation ends after later steps have been logged.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Log the record's numbers."""
        self._run.log({"step": step} | {key: value for key, value in record.items() if value is not None})

    def write_answer(self, step: int, answer: SampledAnswer) -> None:
        """Log the answer as a table of one row; W&B shows those of all steps by its slider."""
        fields = answer.fields()
        self._run.log({"step": step, _ANSWERS: self._table(columns=[*fields], data=[[*fields.values()]])})

    def close(self, *, has_failed: bool = False) -> None:
        """Finish the run, which W&B shows as finished or as failed."""
        self._run.finish(exit_code=int(has_failed))


def _wandb_id(path: Path) -> str:
    """Return the id in a file of the run directory, which is made with a new one at the run's beginning."""
    with disk_errors(path):
        if not path.is_file():
            path.write_text(f"{secrets.token_hex(4)}\n", encoding="ascii")
        return path.read_text(encoding="ascii").strip()


def open_sinks(config: TrainingConfig, run_dir: Path, *, first_step: int = 0) -> list[Sink]:
    """Open the sinks of a run, which was resumed after `first_step` optimizer steps."""
    tensorboard = TensorBoardSink(run_dir / "tensorboard", first_step=first_step)
    sinks: list[Sink] = [JsonlSink(run_dir / METRICS), tensorboard]
    if config.run.wandb:
        sinks.append(WandbSink(config, run_dir))
    return sinks
