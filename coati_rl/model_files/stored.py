"""Read what a model directory's weight files hold: the names, shapes and dtypes of tensors, without their data.

The files are those that transformers reads: model.safetensors, else those of its index, else pytorch_model.bin. The
header of a safetensors file covers the file to its last byte, so that a file that was cut off is found without reading
it.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coati_rl.errors import ConfigError

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLE = "pytorch_model.bin"
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_AGAIN = "download or copy it again"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}  # of safetensors


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Describe a tensor of a weight file."""

    file: Path
    meta: Tensor  # on torch's meta device: shape and dtype


def has_weights(directory: Path) -> bool:
    """Return True if there is any file of weights, whole or not."""
    return any(
        True for suffix in ("safetensors", "safetensors.index.json", "bin") for _ in directory.glob(f"*.{suffix}")
    )


def weight_files(directory: Path, where: str, *, takes_any: bool = False) -> tuple[Path, ...]:
    """Return the files of a model's weights.

    Args:
        directory: of the model.
        where: flag and directory, for messages.
        takes_any: without model.safetensors and index take whatever safetensors files there are, as vLLM does.
    Raises: ConfigError if there are none, or an index and the files differ.
    """
    whole, index = directory / _WHOLE, directory / _INDEX
    if whole.is_file():
        named = set(_weight_map(index, where).values()) if index.is_file() else {_WHOLE}
        if named != {_WHOLE}:
            raise ConfigError(
                f"{where}: {_INDEX} names {min(named - {_WHOLE})}, and there is a {_WHOLE} too: engines read the one "
                "and transformers the other; remove the one that is out of date"
            )
        return (whole,)
    if index.is_file():
        return _indexed(index, where)
    if takes_any and (files := sorted(directory.glob("*.safetensors"))):
        return tuple(files)
    if (directory / _PICKLE).is_file():
        return (directory / _PICKLE,)
    if (directory / _PICKLE_INDEX).is_file():
        return _indexed(directory / _PICKLE_INDEX, where)
    raise ConfigError(f"{where}: has no weights: there is neither {_WHOLE} nor {_INDEX}; {_AGAIN}")


def read_stored(directory: Path, where: str, *, takes_any: bool = False) -> dict[str, StoredTensor]:
    """Return the tensors of a model's weight files by name; the arguments are those of `weight_files`.

    Raises: ConfigError naming file or tensor: a file that is cut off or damaged, a tensor that is not where the index
        says, or in two files.
    """
    stored: dict[str, StoredTensor] = {}
    files = weight_files(directory, where, takes_any=takes_any)
    for file in files:
        with _damage(where, file):
            found = _pickled(file) if file.suffix == ".bin" else _headers(file)
        for name, meta in found.items():
            if name in stored:
                raise ConfigError(
                    f"{where}: {name} is in {stored[name].file.name} and in {file.name}; remove the file that is no "
                    "part of the model"
                )
            stored[name] = StoredTensor(file=file, meta=meta)
    index = directory / (_PICKLE_INDEX if files[0].suffix == ".bin" else _INDEX)
    for name, file_name in _weight_map(index, where).items() if index.is_file() else ():
        if name not in stored or stored[name].file.name != file_name:
            raise ConfigError(f"{where}: {file_name} lacks {name}, which {index.name} says is there; {_AGAIN}")
    return stored


@contextmanager
def tensors_of(file: Path, where: str) -> Iterator[Any]:
    """Open a weight file; `get_tensor` of what is returned maps a tensor's data. Raises: ConfigError."""
    with _damage(where, file):
        if file.suffix == ".bin":
            yield _Pickle(torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file)))
        else:
            with safe_open(file, framework="pt") as opened:
                yield opened


@dataclass(frozen=True, slots=True)
class _Pickle:
    """Give the tensors of a pickled file as safetensors does."""

    tensors: Mapping[str, Tensor]

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def _indexed(index: Path, where: str) -> tuple[Path, ...]:
    """Return the files that an index names. Raises: ConfigError if one is missing."""
    weight_map = _weight_map(index, where)
    for name, file_name in sorted(weight_map.items()):
        if not (index.parent / file_name).is_file():
            raise ConfigError(
                f"{where}: {file_name} is missing, where {index.name} has {name}; download or copy the file"
            )
    return tuple(index.parent / file_name for file_name in sorted(set(weight_map.values())))


def _weight_map(index: Path, where: str) -> dict[str, str]:
    """Return the file of each tensor by an index. Raises: ConfigError if it cannot be read."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if not weight_map or not all(isinstance(each, str) for each in weight_map.values()):
            raise ValueError("its weight_map does not name files")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{where}: {index.name} cannot be read: {_text(error)}; {_AGAIN}") from error
    return dict(weight_map)


def _headers(file: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (not a mapping)
            part = tensors.get_slice(name)
            dtype = _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise ValueError(f"{name} has the dtype {part.get_dtype()}, which torch lacks")
            found[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
    return found


def _pickled(file: Path) -> dict[str, Tensor]:
    found = torch.load(file, map_location="meta", weights_only=True)
    if not isinstance(found, dict) or not found:
        raise ValueError("it does not hold tensors by name")
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__} and no tensor")
    return dict(found)


@contextmanager
def _damage(where: str, file: Path) -> Iterator[None]:
    """Turn what reading a damaged file raises into a ConfigError; torch's loader raises a dozen kinds."""
    try:
        yield
    except ConfigError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{where}: {file.name} is cut off or damaged: {_text(error)}; {_AGAIN}") from error
    except Exception as error:
        if file.suffix != ".bin":
            raise
        raise ConfigError(f"{where}: {file.name} cannot be read: {_text(error)}; {_AGAIN}") from error


def _text(error: Exception) -> str:
    """Return an error's first line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
