"""Find and name the weights that a path stands for (model, adapter, checkpoint, run), and compare two sets of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from coati_rl.checkpoint.directory import find_checkpoint
from coati_rl.checkpoint.saved_adapter import check_base, recorded_base
from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import AdapterDirectory, is_adapter, read_adapter
from coati_rl.model_files.identity import (
    TensorDigest,
    adapter_tensors,
    base_directory,
    digest_of,
    identity_of,
    identity_of_adapter,
    model_digests,
    model_tensors,
)
from coati_rl.model_files.stored import tensors_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Hold which weights a path stands for."""

    path: Path  # as given
    directory: Path
    identity: str
    tensors: Mapping[str, TensorDigest]  # of the directory's own
    adapter: AdapterDirectory | None = None  # None: of a model
    base_identity: str | None = None  # of an adapter's base
    base_directory: Path | None = None  # of an adapter's base, if it is here
    is_zero: bool = False  # an adapter that changes nothing

    @property
    def num_parameters(self) -> int:
        """Return the numbers in the directory's own tensors."""
        return sum(prod(each.shape) for each in self.tensors.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Hold how the tensors of one directory differ from those of another, by name."""

    num_equal: int
    missing: tuple[str, ...]  # of the first
    unknown: tuple[str, ...]  # only in the first
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    dtypes: Mapping[str, tuple[str, str]]  # of tensors of the same shape
    largest: Mapping[str, float]  # difference of an element, of tensors of the same shape that differ


def find_weights(path: Path, where: str) -> Path:
    """Return the directory of a model or an adapter: a path's own, or that of a run's newest complete checkpoint.

    Raises: ConfigError, which begins with `where`.
    """
    path = path.expanduser()
    if is_adapter(path) or (path / "config.json").is_file():
        return path.absolute()
    if not path.is_dir():
        raise ConfigError(f"{where}: no such directory; give that of a model, an adapter, a checkpoint or a run")
    try:
        return find_checkpoint(path)
    except ConfigError as error:
        raise ConfigError(f"{where}: holds no model, adapter or complete checkpoint; give one of them") from error


def weights_of(path: Path, where: str, *, base: Path | None = None) -> Weights:
    """Name the weights that a path stands for; all of them are read, one tensor at a time.

    Args:
        path: of a model, an adapter, a checkpoint or a run.
        where: flag and value, for messages.
        base: of an adapter; None: the one that its directory names.
    Raises: ConfigError, which begins with `where`: an adapter of another base, or of one that is not known.
    """
    directory = find_weights(path, where)
    if not is_adapter(directory):
        digests = model_digests(directory, where)
        return Weights(path=path, directory=directory, identity=identity_of(digests.values()), tensors=digests)
    adapter = read_adapter(directory, where)
    found = base or base_directory(adapter)
    if found is not None:
        check_base(directory, found, where)
        base_identity = identity_of(model_digests(found, f"{where}: base {found}").values())
    elif (recorded := recorded_base(directory)) is not None:
        base_identity = recorded
    else:
        raise ConfigError(f"{where}: its base {adapter.base!r} is not here; give the base's directory with --base")
    tensors = {name: digest_of(name, tensor) for name, tensor in adapter_tensors(directory, where)}
    return Weights(
        path=path,
        directory=directory,
        identity=identity_of_adapter(tensors.values(), adapter.spec, base_identity),
        tensors=tensors,
        adapter=adapter,
        base_identity=base_identity,
        base_directory=found,
        is_zero=_is_zero(dict(adapter_tensors(directory, where))),
    )


def relation(first: Weights, second: Weights) -> str:
    """Return in one sentence how two sets of weights are related."""
    if first.identity == second.identity:
        return "the same weights"
    for adapter, other, which in ((first, second, "the first"), (second, first, "the second")):
        if adapter.adapter is not None and other.adapter is None and adapter.base_identity == other.identity:
            what = f"{which} is an adapter of the other, which is the base itself"
            return f"{what}; it changes nothing" if adapter.is_zero else what
    if first.base_identity is not None and first.base_identity == second.base_identity:
        return "different adapters of the same base"
    if first.adapter is not None and second.adapter is not None:
        return "adapters of different bases"
    return "different weights"


def compare(first: Weights, second: Weights) -> Comparison | None:
    """Compare two models, or two adapters, tensor by tensor; None of a model and an adapter."""
    if (first.adapter is None) != (second.adapter is None):
        return None
    one, other = first.tensors, second.tensors
    both = [name for name in one if name in other]
    alike = [name for name in both if one[name].shape == other[name].shape]
    differing = [name for name in alike if one[name].line != other[name].line]
    return Comparison(
        num_equal=sum(one[name].line == other[name].line for name in both),
        missing=tuple(sorted(set(other) - set(one))),
        unknown=tuple(sorted(set(one) - set(other))),
        shapes={name: (one[name].shape, other[name].shape) for name in both if name not in set(alike)},
        dtypes={name: (one[name].dtype, other[name].dtype) for name in alike if one[name].dtype != other[name].dtype},
        largest={name: _largest_difference(_tensor(first, name), _tensor(second, name)) for name in differing},
    )


def _largest_difference(one: Tensor, other: Tensor) -> float:
    dtype = torch.float64 if torch.float64 in (one.dtype, other.dtype) else torch.float32
    return float((one.to(dtype) - other.to(dtype)).abs().max()) if one.numel() else 0.0


def _tensor(weights: Weights, name: str) -> Tensor:
    if weights.adapter is not None:
        return next(tensor for found, tensor in adapter_tensors(weights.directory) if found == name)
    stored = model_tensors(weights.directory)[name]
    with tensors_of(stored.file, str(weights.directory)) as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor


def _is_zero(tensors: Mapping[str, Tensor]) -> bool:
    """Return True if no product of an adapter's factors changes a weight, and nothing is replaced."""
    factors = [name for name in tensors if name.endswith((".lora_A.weight", ".lora_B.weight"))]
    layers = {name.rpartition(".lora_")[0] for name in factors}
    return len(factors) == len(tensors) and all(
        not tensors[f"{layer}.lora_B.weight"].any() or not tensors[f"{layer}.lora_A.weight"].any() for layer in layers
    )
