"""Read the rows of a file (JSONL, JSON, CSV, Parquet, Arrow), of the files in a directory, or of a dataset on the hub.

A row comes with its flag, file and line or row, for messages. JSON is read row by row, and not into columns, whose type
would change values: an integer beside 0.5, text that looks like a date. Values of CSV are text: read as numbers, 4.0
would be the answer 4 where another row has none.
"""

import csv
import json
import logging
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.reading.arrow_values import rows_of_dataset
from coati_rl.reading.json_text import UnusableJsonError, json_values, parse_json
from coati_rl.reading.lines import lines_of

LocatedRow = tuple[str, Any]  # flag, file and row, and the row itself

_LOADERS = {".jsonl": "", ".json": "", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}  # of `datasets`
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))??(?::([^:\[]+(?:\[[^\]]*\])?))?")
_STATE_OF_SAVED = ("dataset_info.json", "state.json", "dataset_dict.json")  # which `Dataset.save_to_disk` writes


def expect_source(source: str, *, flag: str) -> None:
    """Refuse a source of `each_row` that is neither a directory nor a file of a known format, nor a name of the hub's.

    Raises: ConfigError.
    """
    path = Path(source).expanduser()
    if not path.is_dir() and (path.exists() or not _hub_name(source)):
        _expect_file(path, source, flag)


def read_rows(source: str, *, flag: str, max_rows: int | None = None) -> list[LocatedRow]:
    """Return the rows of a source in a list; see `each_row`."""
    return [*each_row(source, flag=flag, max_rows=max_rows)]


def each_row(source: str, *, flag: str, max_rows: int | None = None) -> Iterator[LocatedRow]:
    """Read the rows of a source one by one.

    Args:
        source: a file, whose suffix names the format; a directory of such files, or that `Dataset.save_to_disk` wrote;
            or owner/name, owner/name:split or owner/name:subset:split of the hub (train where no split is named).
        flag: the command-line flag it came from, for messages.
        max_rows: read no more than the first of them; None: all.
    Raises: ConfigError naming file and row (for JSONL: line) and what is wrong with it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        rows: Iterator[LocatedRow] = (
            row for file in files_of(path, source, flag) for row in _rows_of_file(file, str(file), flag)
        )
    elif not path.exists() and (named := _hub_name(source)):
        rows = _rows_of_hub(source, *named, flag)
    else:
        rows = _rows_of_file(path, source, flag)
    row = None
    for row in islice(rows, max_rows):
        yield row
    if row is None:
        raise ConfigError(f"{flag} {source}: holds no rows")


def files_of(folder: Path, source: str, flag: str) -> list[Path]:
    """Return the data files of a directory, by name; of a saved DatasetDict those of its train split."""
    if (folder / "dataset_dict.json").is_file():
        folder = folder / "train"
        if not folder.is_dir():
            raise ConfigError(f"{flag} {source}: is a saved DatasetDict without a train split; give one of its folders")
    files = sorted(
        file for file in folder.iterdir() if file.suffix.lower() in _LOADERS and file.name not in _STATE_OF_SAVED
    )
    if not files:
        raise ConfigError(f"{flag} {source}: the directory holds no {', '.join(_LOADERS)} file; give one that does")
    return files


def _expect_file(file: Path, name: str, flag: str) -> None:
    if not file.is_file():
        raise ConfigError(
            f"{flag} {name}: no such file; give a JSONL, JSON, CSV, Parquet or Arrow file, a directory of them, or "
            "owner/name[:split] of the hub"
        )
    if file.suffix.lower() not in _LOADERS:
        raise ConfigError(f"{flag} {name}: unknown format {file.suffix!r}; use one of {', '.join(_LOADERS)}")


def _rows_of_file(file: Path, name: str, flag: str) -> Iterator[LocatedRow]:
    _expect_file(file, name, flag)
    suffix = file.suffix.lower()
    unit = "line" if suffix == ".jsonl" else "row"
    read = {".jsonl": _read_jsonl, ".json": _read_json}.get(suffix, _read_with_datasets)
    try:
        for number, row in read(file, flag):
            yield f"{flag} {name}, {unit} {number}", row
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {name}: is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ConfigError(f"{flag} {name}: cannot be read: {error.strerror or error}") from error


def row_of_line(line: bytes, where: str) -> Any:
    """Return the row of a line of JSONL. Raises: ConfigError; `where` names flag, file and line."""
    text = ""
    try:
        text = line.decode()
        return parse_json(text)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: is not UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg}: {text.strip()[:80]}") from error
    except UnusableJsonError as error:
        raise ConfigError(f"{where}: {error}") from error


def _read_jsonl(file: Path, flag: str) -> Iterator[tuple[int, Any]]:
    # Line by line ourselves: the loader of `datasets` names no line, and a typo in line 7000 must be found.
    with file.open("rb") as lines:
        for number, (_, line) in enumerate(lines_of(lines), 1):
            if line.strip():
                yield number, row_of_line(line, f"{flag} {file}, line {number}")


def _read_json(file: Path, flag: str) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        for number, row in enumerate(json_values(file.read_text(encoding="utf-8-sig")), 1):
            yield number, {"text": row} if isinstance(row, str) else row
    except json.JSONDecodeError as error:
        raise ConfigError(f"{flag} {file}: cannot be read as json: {error}") from error
    except UnusableJsonError as error:
        raise ConfigError(f"{flag} {file}, row {number + 1}: {error}") from error


def _read_with_datasets(file: Path, flag: str) -> Iterator[tuple[int, Any]]:
    import tempfile

    if not file.stat().st_size:
        return  # each loader has an error of its own for this
    datasets = _quiet_datasets()
    loader = _LOADERS[file.suffix.lower()]
    options = _all_as_text(file) if loader == "csv" else {}
    with tempfile.TemporaryDirectory(prefix="coati-datasets-") as cache:
        try:
            table = datasets.load_dataset(loader, data_files=str(file), split="train", cache_dir=cache, **options)
        except (datasets.exceptions.DatasetGenerationError, ValueError, TypeError, RuntimeError, OSError) as error:
            cause = " ".join(str(error.__cause__ or error).split())
            if "corresponds to no data" in cause:
                return
            raise ConfigError(f"{flag} {file}: cannot be read as {loader}: {cause[:200]}") from error
        yield from _numbered(table, f"{flag} {file}")


def _numbered(table: Any, where: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a `datasets.Dataset` with their number. Raises: ConfigError."""
    number = 0
    try:
        for number, row in enumerate(rows_of_dataset(table), 1):
            yield number, row
    except (json.JSONDecodeError, UnusableJsonError) as error:
        raise ConfigError(f"{where}, row {number + 1}: {error}") from error


def _all_as_text(file: Path) -> dict[str, Any]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        columns = next(csv.reader(lines), [])
    return {"converters": dict.fromkeys(columns, str), "keep_default_na": False}


def _hub_name(source: str) -> tuple[str, str | None, str] | None:
    """Return name, subset and split of a dataset on the hub; None for what must be a path."""
    match = _HUB.fullmatch(source)
    if match is None or source.startswith(".") or Path(match[1]).suffix.lower() in _LOADERS:
        return None
    if Path(match[1]).parent.is_dir():
        return None  # a file that is missing from a folder
    return match[1], match[2], match[3] or "train"


def _rows_of_hub(source: str, name: str, subset: str | None, split: str, flag: str) -> Iterator[LocatedRow]:
    datasets = _quiet_datasets()
    try:
        table = datasets.load_dataset(name, subset, split=split)
    except (datasets.exceptions.DatasetsError, ValueError, TypeError, RuntimeError, OSError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(
            f"{flag} {source}: neither a file nor a dataset that the hub provides as {name}, split {split}: "
            f"{type(error).__name__}: {cause[:200]}"
        ) from error
    for number, row in _numbered(table, f"{flag} {source}"):
        yield f"{flag} {source}, row {number}", row


def _quiet_datasets() -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # errors are reported here
    return datasets
