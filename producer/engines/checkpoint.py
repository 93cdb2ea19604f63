"""Read tensor names, shapes and dtypes from a checkpoint's safetensors headers, and check weight updates against them.

vLLM silently accepts an update that lacks a layer, and an unknown name ends it. Therefore names, shapes and dtypes are
compared before the first byte is received.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from coati_rl.errors import ConfigError, EngineError, TransferError
from coati_rl.model_files.adapted_layers import layers_of_directory, peft_shapes
from coati_rl.model_files.adapter_files import AdapterSpec
from coati_rl.model_files.identity import model_identity, weights_identity
from coati_rl.model_files.stored import read_stored
from coati_rl.model_files.values import HEAD, has_own_head
from coati_rl.transport.manifest import TensorEntry, WeightManifest

_DTYPES = ("float32", "bfloat16", "float16")
_MAX_NAMED = 3  # tensors named in an error message


def find_checkpoint(model: str) -> Path:
    """Return the directory of a local model, or of a hub model in the local cache. Raises: EngineError."""
    path = Path(model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise EngineError(f"model {model!r} is neither a directory nor in the Hugging Face cache") from error


def read_entries(directory: Path, *, dtype: str | None = None) -> dict[str, TensorEntry]:
    """Return the tensors that an update of this model must hold, by name, without a tied lm_head.

    Args:
        directory: of the model.
        dtype: that the engine loads weights in; None: that of the files.
    Raises: EngineError if there is no safetensors file, or one cannot be read or has an unsupported dtype.
    """
    where = f"model {directory}"
    try:
        stored = read_stored(directory, where, takes_any=True)
    except ConfigError as error:
        raise EngineError(f"{error}; engines read .safetensors files") from error
    entries: dict[str, TensorEntry] = {}
    for name, each in stored.items():
        its_dtype = str(each.meta.dtype).removeprefix("torch.")
        if each.file.suffix == ".bin":
            raise EngineError(
                f"{directory} holds no .safetensors file, which is needed to check weight updates; "
                "save the model with safe_serialization=True"
            )
        if its_dtype not in _DTYPES:
            raise EngineError(f"{each.file.name}: tensor {name!r} is {its_dtype}; known: {', '.join(_DTYPES)}")
        entries[name] = TensorEntry(name=name, dtype=its_dtype, shape=tuple(each.meta.shape))
    loaded_in = None if dtype is None else getattr(torch, dtype)
    if _ties_embeddings(directory) and not has_own_head(stored, loaded_in, where):
        entries = {name: entry for name, entry in entries.items() if not name.endswith(HEAD)}
    return entries


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedUpdate:
    """Say what the updates of an engine hold."""

    entries: Mapping[str, TensorEntry]  # by name
    dtype: str  # of the engine; a tensor may have the one of its entry, too
    base: str = ""  # identity of the base of adapters; empty: updates hold all weights

    def check(self, manifest: WeightManifest) -> None:
        """Raise TransferError unless an update is of this kind; see `check_manifest`."""
        check_manifest(manifest, self.entries, dtype=self.dtype, base=self.base)

    def identity(self, digest: str) -> str:
        """Return the identity of the weights that serve with an update."""
        return weights_identity(self.base, digest)


def expect_update(directory: Path, dtype: str, adapter: AdapterSpec | None) -> ExpectedUpdate:
    """Return what updates of a model hold. `adapter`: that they hold alone. Raises: EngineError, ConfigError."""
    if adapter is None:
        return ExpectedUpdate(entries=read_entries(directory, dtype=dtype), dtype=dtype)
    shapes = peft_shapes(layers_of_directory(directory, adapter.targets), adapter)
    entries = {name: TensorEntry(name=name, dtype="float32", shape=shape) for name, shape in shapes}
    return ExpectedUpdate(entries=entries, dtype=dtype, base=model_identity(directory))


def _ties_embeddings(directory: Path) -> bool:
    """Return True if config.json says that the model's lm_head is its embedding."""
    from transformers import AutoConfig

    return bool(AutoConfig.from_pretrained(directory).get_text_config().tie_word_embeddings)


def check_manifest(
    manifest: WeightManifest, expected: Mapping[str, TensorEntry], *, dtype: str, base: str = ""
) -> None:
    """Raise TransferError unless the update has exactly this model's names and shapes, and a supported dtype.

    Args:
        manifest: describes the update.
        expected: the model's tensors by name.
        dtype: the engine's dtype; the checkpoint's is allowed, too.
        base: identity of the weights that the engine has loaded, if updates are adapters of them.
    """
    if manifest.base != base:
        raise TransferError(
            f"version {manifest.policy_version} is refused: the trainers send {_of_base(manifest.base)}, and the "
            f"engine serves {_of_base(base)}; give both the same --model and --lora-sync"
        )
    announced = {entry.name: entry for entry in manifest.entries}
    problems = [
        *(f"{name} is missing" for name in expected if name not in announced),
        *(f"{name} is unknown" for name in announced if name not in expected),
    ]
    for name, entry in announced.items():
        if name in expected:
            if entry.shape != expected[name].shape:
                problems.append(f"{name} has shape {entry.shape}, the model's has {expected[name].shape}")
            if entry.dtype not in (dtype, expected[name].dtype):
                problems.append(f"{name} is {entry.dtype}, the engine computes in {dtype}")
    if problems:
        more = f" and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise TransferError(
            f"version {manifest.policy_version} is refused: {'; '.join(problems[:_MAX_NAMED])}{more}. "
            "A tied lm_head must not be sent."
        )


def _of_base(identity: str) -> str:
    return f"adapters of the base {identity}" if identity else "whole weights"
