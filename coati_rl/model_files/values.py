"""Check the values of a model's tensors: finite ones, and an LM head that config.json calls tied."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from coati_rl.errors import ConfigError
from coati_rl.model_files.stored import StoredTensor, tensors_of

HEAD = "lm_head.weight"
MAX_SCANNED_BYTES = 2 * 2**30  # of files whose values are read before anything starts: a second; trainers read all
_CHECKED = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def check_finite(tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Raise ConfigError naming the first tensor with a value that is not finite."""
    for name, tensor in tensors:
        if tensor.dtype not in _CHECKED or not tensor.numel():
            continue
        least, most = torch.aminmax(tensor.detach())  # both NaN if one value is
        if not (torch.isfinite(least) and torch.isfinite(most)):
            which = "NaN" if torch.isnan(least) else "infinite values"
            raise ConfigError(f"{where}: {name} has {which}; use a model or checkpoint from before they came")


def check_stored_values(stored: Mapping[str, StoredTensor], where: str) -> None:
    """Check the values of files that are not large. Raises: ConfigError naming file and tensor."""
    files = sorted({each.file for each in stored.values()})
    if sum(file.stat().st_size for file in files) > MAX_SCANNED_BYTES:
        return
    for file in files:
        with tensors_of(file, where) as opened:
            names = [name for name, each in stored.items() if each.file == file and each.meta.dtype in _CHECKED]
            check_finite(((name, opened.get_tensor(name)) for name in names), f"{where}: {file.name}")


def has_own_head(stored: Mapping[str, StoredTensor], dtype: torch.dtype | None, where: str) -> bool:
    """Return True if a model whose config.json says that its LM head is the embedding has another head in its files.

    transformers and vLLM use that head then, and make one parameter of two equal ones. Both compare in the dtype that
    the weights are loaded in.

    Args:
        stored: its tensors.
        dtype: that weights are loaded in; None: that of the files.
        where: flag and directory, for messages.
    """
    heads = [name for name in stored if name.endswith(HEAD)]
    if not heads:
        return False
    head = stored[heads[0]]
    others = [name for name, each in stored.items() if name not in heads and each.meta.shape == head.meta.shape]
    if not others:  # the embedding is the head
        return False
    with tensors_of(head.file, where) as opened:
        values = opened.get_tensor(heads[0])
        values = values.to(dtype or values.dtype)
    return not any(_is_equal(values, stored[name].file, name, dtype, where) for name in others)


def _is_equal(values: Tensor, file: Path, name: str, dtype: torch.dtype | None, where: str) -> bool:
    with tensors_of(file, where) as opened:
        return torch.equal(values, opened.get_tensor(name).to(dtype or values.dtype))
