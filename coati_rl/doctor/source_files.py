"""Read what a run was made of, where it is still on this machine: chat templates, and rows that two files share."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Given = TypeVar("Given")
Found = TypeVar("Found")

_MAX_BYTES = 64 * 2**20  # of a file of rows
# What templates write as one token: <|im_start|>, [INST], <start_of_turn>, </s>.
_MARKER = re.compile(r"<\|[^|<>{}\s]{1,40}\|>|\[/?INST\]|</?[a-z]{1,12}(?:_[a-z]{1,12}){1,3}>")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFiles:
    """Hold facts about a run's model and data."""

    own_template: str | None = None  # chat template of the model's directory
    vocabulary_markers: frozenset[str] | None = None  # its tokens that are added or special; None: unknown
    shared_rows: Mapping[str, tuple[int, int]] | None = (
        None  # evaluation set -> rows that are in the training file; rows
    )


UNKNOWN = SourceFiles()


def markers_of(template: str) -> frozenset[str]:
    """Return the texts in a chat template that look like special tokens."""
    return frozenset(_MARKER.findall(template))


def read_source_files(config: Mapping[str, Any]) -> SourceFiles:
    """Read what a run's configuration names; what is missing, or cannot be read, is unknown."""
    model = Path(str(config.get("model", "")))
    return SourceFiles(
        own_template=_if_readable(_template_of, model),
        vocabulary_markers=_added_tokens(model),
        shared_rows=_if_readable(_shared_rows, config),
    )


def _if_readable(read: Callable[[Given], Found | None], of: Given) -> Found | None:
    """Return what was read; None where a file, or a directory above it, is not this user's to read."""
    try:
        return read(of)
    except OSError:
        return None


def _template_of(model: Path) -> str | None:
    if (model / "chat_template.jinja").is_file():
        return (model / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    template = _json(model / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def _added_tokens(model: Path) -> frozenset[str] | None:
    tokens = _json(model / "tokenizer.json").get("added_tokens")
    if not isinstance(tokens, list):
        return None
    return frozenset(str(each.get("content")) for each in tokens if isinstance(each, dict))


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _shared_rows(config: Mapping[str, Any]) -> dict[str, tuple[int, int]] | None:
    sets, training = config.get("eval_dataset"), config.get("dataset")
    if not isinstance(sets, dict) or not isinstance(training, str):
        return None
    rows = frozenset(_rows_in(Path(training)))
    found = {name: [*_rows_in(Path(str(path)))] for name, path in sets.items()}
    return {name: (sum(row in rows for row in its), len(its)) for name, its in found.items() if its}


def _rows_in(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of JSON Lines: rows are compared byte for byte."""
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as file:
            yield from filter(None, (line.strip() for line in file.read(_MAX_BYTES).split(b"\n")))
