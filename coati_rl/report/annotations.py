"""Keep what people note of rollouts in the run's directory: a line of annotations.jsonl each, never changed."""

import json
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from coati_rl.errors import ConfigError
from coati_rl.observability.sinks import JsonlSink
from coati_rl.run_reader.run_directory import ANNOTATIONS

MAX_FILE_BYTES = 4 << 20
MAX_NOTE_BYTES = 1 << 16  # of a request


class Note(BaseModel):
    """Name a rollout and say something of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)

    step: int = Field(ge=1)
    uid: str = Field(min_length=1, max_length=400)
    sample: int = Field(ge=0)
    text: str = Field(min_length=1, max_length=4000)


def annotate(run_dir: Path, note: Note) -> None:
    """Append a note with the time. Raises: ConfigError if the file is full; RunError if it cannot be written."""
    path = run_dir / ANNOTATIONS
    record = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **note.model_dump()}
    if path.is_file() and path.stat().st_size + len(json.dumps(record)) >= MAX_FILE_BYTES:
        raise ConfigError(f"{path}: has {MAX_FILE_BYTES >> 20} MiB of notes, and takes no more; move it away")
    sink = JsonlSink(path)
    try:
        sink.write(note.step, record)
    finally:
        sink.close()
