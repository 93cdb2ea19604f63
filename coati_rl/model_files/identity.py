"""Name weights by their content, so that two processes can tell whether they have the same ones.

A model's identity is xxh3-128 over its tensors' names, dtypes, shapes and bytes, whatever files they are in. Policy
weights that are a base with adapters are named by the base's identity and the digest of the adapters.
"""

from pathlib import Path

import torch
import xxhash

from coati_rl.model_files.stored import read_stored, tensors_of


def model_identity(directory: Path) -> str:
    """Return the identity of a model's stored weights, hexadecimal. Raises: ConfigError if they cannot be read."""
    where, lines = f"model {directory}", list[str]()
    stored = read_stored(directory, where, takes_any=True)
    for file in sorted({each.file for each in stored.values()}):
        with tensors_of(file, where) as opened:
            for name in (name for name, each in stored.items() if each.file == file):
                tensor = opened.get_tensor(name).contiguous()
                content = xxhash.xxh3_128_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)
                lines.append(f"{name} {tensor.dtype} {list(tensor.shape)} {content}\n")
    return xxhash.xxh3_128_hexdigest("".join(sorted(lines)).encode())


def weights_identity(base: str, digest: str) -> str:
    """Return the identity of the weights of a policy version, hexadecimal.

    Args:
        base: identity of the base of adapters; empty: all weights were sent.
        digest: of what was sent.
    """
    return xxhash.xxh3_128_hexdigest(f"{base} {digest}".encode()) if base else digest
