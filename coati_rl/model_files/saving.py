"""Write the settings files of a checkpoint: config.json and generation_config.json.

transformers reads files that it refuses to write, such as a temperature without do_sample. They are the model's own, so
they are written back as they were. The same function is tried before anything starts, into a temporary directory.
"""

import copy
import logging
import tempfile
from collections.abc import Iterator
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION = "generation_config.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What transformers raises for values that it does not write; an OSError is the disk's.
_REFUSED = (ValueError, TypeError, AttributeError, KeyError, AssertionError)


def write_settings(directory: Path, config: Any, generation: Any | None, source: Path) -> Iterator[str]:
    """Write a model's settings; a file that transformers refuses to write is copied from the model as it is.

    Args:
        directory: written to.
        config: transformers config as it is to be saved.
        generation: transformers GenerationConfig; None: there is none to write.
        source: directory of the model.
    Yields: a line for each file that was not written by transformers.
    Raises: OSError.
    """
    settings = [(CONFIG, copy.deepcopy(config)), (GENERATION, generation)]
    for name, each in settings:
        if each is None:
            continue
        try:
            each.save_pretrained(directory)
        except _REFUSED as error:
            what = " ".join(str(error).split())
            (directory / name).unlink(missing_ok=True)  # half of it may be written
            content = file_of_model(source / name)
            if content is not None:
                (directory / name).write_bytes(content)
                yield f"{name}: transformers reads it and does not write it ({what}): checkpoints get it as it is"
            else:
                yield f"{name}: transformers does not write it ({what}): checkpoints are without it"


def file_of_model(path: Path) -> bytes | None:
    """Return a file of the model's directory; None if there is none, or, with a warning, if it cannot be read any more.

    A checkpoint is written in any case: its weights took hours, and this file is elsewhere, too.
    """
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError as error:
        logger.warning("checkpoints are without %s: %s cannot be read: %s", path.name, path, error.strerror or error)
        return None


def try_to_save(directory: Path, config: Any, where: str) -> list[str]:
    """Try what a checkpoint of this model writes beside its weights. Returns: warnings.

    Raises: ConfigError naming file and field, for values of a wrong type, and if nothing can be written at all.
    """
    generation = read_generation(directory, where)
    with tempfile.TemporaryDirectory(prefix="coati-save-") as scratch:
        lines = [*write_settings(Path(scratch), config, generation, directory)]
    return [f"{where}: {line}" for line in lines]


def read_generation(directory: Path, where: str) -> Any | None:
    """Return a model's GenerationConfig; None without a file. Raises: ConfigError naming file and field."""
    from transformers import GenerationConfig

    if not (directory / GENERATION).is_file():
        return None
    try:
        generation = GenerationConfig.from_pretrained(directory)
        wrong = next(_wrong_types(generation), None)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"{where}: {GENERATION} cannot be read: {what}; correct or remove it") from error
    if wrong:
        raise ConfigError(f"{where}: {GENERATION}: {wrong}; correct it")
    return generation


def _wrong_types(generation: Any) -> Iterator[str]:
    """Yield the settings whose type is neither that of their default nor that of token ids."""
    for name in _TOKEN_IDS:
        value = getattr(generation, name, None)
        listed = value if isinstance(value, list) else [value]
        if not all(each is None or (isinstance(each, Integral) and not isinstance(each, bool)) for each in listed):
            yield f"{name} is {value!r} and not the id of a token"
    for name, default in generation._get_default_generation_params().items():
        value = getattr(generation, name, None)
        if value is None or not isinstance(default, bool | int | float) or name == "early_stopping":
            continue  # early_stopping may be "never"
        kind: Any = bool if isinstance(default, bool) else Real
        if not isinstance(value, kind) or (kind is Real and isinstance(value, bool)):
            yield f"{name} is {value!r} and not {'true or false' if kind is bool else 'a number'}"
