"""Read tensor names, shapes and dtypes from a checkpoint's safetensors headers, and check weight updates against them.

vLLM silently accepts an update that lacks a layer, and an unknown name ends it. Therefore names, shapes and dtypes are
compared before the first byte is received.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from coati_rl.errors import EngineError, TransferError
from coati_rl.transport.manifest import TensorEntry, WeightManifest

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
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


def read_entries(directory: Path) -> dict[str, TensorEntry]:
    """Return the tensors that an update of this model must hold, by name, without a tied lm_head.

    Raises: EngineError if there is no safetensors file, or one has an unsupported dtype.
    """
    index, whole = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [directory / name for name in names]
    elif whole.is_file():
        files = [whole]  # our checkpoints hold optimizer tensors in further files
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise EngineError(
            f"{directory} holds no .safetensors file, which is needed to check weight updates; "
            "save the model with safe_serialization=True"
        )
    entries: dict[str, TensorEntry] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                part = tensors.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise EngineError(
                        f"{file.name}: tensor {name!r} is {part.get_dtype()}; known: {', '.join(_DTYPES)}"
                    )
                entries[name] = TensorEntry(name=name, dtype=dtype, shape=tuple(part.get_shape()))
    if ties_embeddings(directory):
        entries.pop("lm_head.weight", None)
    return entries


def ties_embeddings(directory: Path) -> bool:
    """Return True if the model's lm_head is its embedding."""
    from transformers import AutoConfig

    return bool(AutoConfig.from_pretrained(directory).get_text_config().tie_word_embeddings)


def check_manifest(manifest: WeightManifest, expected: Mapping[str, TensorEntry], *, dtype: str) -> None:
    """Raise TransferError unless the update has exactly this model's names and shapes, and a supported dtype.

    Args:
        manifest: describes the update.
        expected: the model's tensors by name.
        dtype: the engine's dtype; the checkpoint's is allowed, too.
    """
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
