"""Try, before anything starts, that the tokenizer that checkpoints will hold renders and tokenises as the model's does.

The files that a checkpoint holds are written to a temporary directory, and the tokenizer is read from there.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from coati_rl.checkpoint.tokenizer_files import read_tokenizer_files, tokenizer_files, write_files
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.preflight.resources import read_tokenizer
from coati_rl.reading.chat_template import set_variables

Row = TypeVar("Row")
Encoded = tuple[str, list[np.ndarray]]  # a row's name, its tokens and masks

_NUM_ROWS = 16  # of each file, evenly spaced


def check_saved_tokenizer(config: TrainingConfig, tokenizer: Any, encode: Callable[[Any], Iterator[Encoded]]) -> None:
    """Compare the two tokenizers, and what `encode` makes with them. Raises: ConfigError naming a row that differs."""
    directory, template = Path(config.model.model), config.data.chat_template
    saved = _as_saved(directory, template, _signature(directory))
    set_variables(saved, date=config.data.template_date, variables=config.data.chat_template_kwargs)
    for name, own, its in (
        ("vocabulary", tokenizer.get_vocab(), saved.get_vocab()),
        ("named special tokens", tokenizer.special_tokens_map, saved.special_tokens_map),
        ("chat template", tokenizer.chat_template, saved.chat_template),
    ):
        if own != its:
            raise _refusal(directory, f"has another {name}")
    for (row, own), (_, its) in zip(encode(tokenizer), encode(saved), strict=True):
        if len(own) != len(its) or not all(map(np.array_equal, own, its)):
            raise _refusal(directory, f"makes other tokens of {row} ({_length(its)}, and the model's {_length(own)})")


def _length(arrays: Sequence[np.ndarray]) -> int:
    return sum(len(each) for each in arrays if each.dtype != bool)


def _refusal(directory: Path, what: str) -> ConfigError:
    return ConfigError(
        f"--model {directory}: the tokenizer that its checkpoints would hold {what}; load the model's tokenizer with "
        "transformers, write it with save_pretrained, and give a directory with what that writes"
    )


@lru_cache(maxsize=4)
def _as_saved(directory: Path, chat_template: str | None, _: Any) -> Any:
    """Return the tokenizer of a checkpoint. Raises: ConfigError if it cannot be read."""
    from transformers import __version__

    with TemporaryDirectory() as temporary:
        saved = Path(temporary)
        write_files(saved, read_tokenizer_files(directory, chat_template=chat_template))
        settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        (saved / "config.json").write_text(json.dumps({**settings, "transformers_version": __version__}))
        try:
            return read_tokenizer(saved)
        except ConfigError as error:
            raise _refusal(directory, f"cannot be read ({error.__cause__})") from error


def _signature(directory: Path) -> tuple[Any, ...]:
    """Return what changes when the directory's files do, which cached tokenizers are of."""
    stats = {name: (directory / name).stat() for name in ("config.json", *tokenizer_files(directory))}
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())


def some_rows(rows: Sequence[Row]) -> dict[int, Row]:
    """Return rows of all parts of a file, by their numbers."""
    count = min(len(rows), _NUM_ROWS)
    return {number: rows[number] for number in (place * len(rows) // count for place in range(count))}
