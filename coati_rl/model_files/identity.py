"""Name sets of weights by their contents, whatever files they are cut into.

A tensor's digest is the xxh3_128 of its name, dtype, shape and bytes; a model's identity is that of its tensors' sorted
lines, without an LM head that is the embedding. An adapter's identity is over its base's identity, its exact scale and
its own tensors, by their names without PEFT's prefix. One tensor at a time is read.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import PREFIX, WEIGHTS_FILE, AdapterDirectory, AdapterSpec, read_adapter
from coati_rl.model_files.config import read_config
from coati_rl.model_files.stored import StoredTensor, read_stored, tensors_of
from coati_rl.model_files.values import HEAD, has_own_head
from coati_rl.tensor_bytes import bytes_of

FINGERPRINT_DIGITS = 16  # the first ones, where a short name is enough


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDigest:
    """Describe a tensor and its contents in one line."""

    name: str
    dtype: str  # of torch, without its prefix
    shape: tuple[int, ...]
    digest: str  # of the bytes

    @property
    def line(self) -> str:
        """Return the text that stands for the tensor in an identity."""
        return f"{self.name} {self.dtype} {list(self.shape)} {self.digest}"


def digest_of(name: str, tensor: Tensor) -> TensorDigest:
    """Return the digest of a tensor on the CPU; one that is mapped from a file is read through once."""
    content = bytes_of(tensor.detach().contiguous())
    return TensorDigest(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        digest=xxhash.xxh3_128_hexdigest(content),
    )


def identity_of(tensors: Iterable[TensorDigest], *further: str) -> str:
    """Return the identity of tensors in any order. `further`: lines before theirs."""
    lines = [*further, *sorted(tensor.line for tensor in tensors)]
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def model_tensors(directory: Path, where: str | None = None) -> dict[str, StoredTensor]:
    """Return where a model's tensors are, by name, without an LM head that is the embedding.

    Raises: ConfigError, which begins with `where`.
    """
    where = where or f"model {directory}"
    stored = read_stored(directory, where, takes_any=True)
    if read_config(directory, where).get_text_config().tie_word_embeddings and not has_own_head(stored, None, where):
        return {name: each for name, each in stored.items() if not name.endswith(HEAD)}
    return stored


def read_tensors(stored: Mapping[str, StoredTensor], where: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of files by name, file by file, each mapped as it is needed."""
    for file in dict.fromkeys(each.file for each in stored.values()):
        with tensors_of(file, where) as opened:
            for name, each in stored.items():
                if each.file == file:
                    yield name, opened.get_tensor(name)


def model_identity(directory: Path, where: str | None = None) -> str:
    """Return the identity of a model's weights; the second call for unchanged files reads none of them.

    Raises: ConfigError, which begins with `where`.
    """
    return identity_of(model_digests(directory, where).values())


def model_digests(directory: Path, where: str | None = None) -> Mapping[str, TensorDigest]:
    """Return the digests of a model's tensors by name. Raises: ConfigError, which begins with `where`."""
    where = where or f"model {directory}"
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{where}: has no config.json; give a model in Hugging Face format")
    stats = [(path.name, path.stat()) for path in sorted(directory.iterdir()) if path.is_file()]
    return _digests(directory, where, tuple((name, each.st_size, each.st_mtime_ns) for name, each in stats))


@functools.lru_cache(maxsize=16)
def _digests(directory: Path, where: str, _seen: tuple[tuple[str, int, int], ...]) -> Mapping[str, TensorDigest]:
    return {name: digest_of(name, each) for name, each in read_tensors(model_tensors(directory, where), where)}


def adapter_tensors(directory: Path, where: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's tensors by their names in this project. Raises: ConfigError, which begins with `where`."""
    try:
        with safe_open(directory / WEIGHTS_FILE, "pt") as file:
            for key in file.keys():  # noqa: SIM118, no mapping
                yield key.removeprefix(PREFIX), file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{where or directory}: {WEIGHTS_FILE} cannot be read: {error}") from error


def adapter_identity(directory: Path, base: str, where: str | None = None) -> str:
    """Return the identity of an adapter on a base.

    Args:
        directory: of the adapter.
        base: the base's identity.
        where: flag and value, for messages.
    Raises: ConfigError, which begins with `where`.
    """
    where = where or f"adapter {directory}"
    spec = read_adapter(directory, where).spec
    tensors = (digest_of(name, tensor) for name, tensor in adapter_tensors(directory, where))
    return identity_of_adapter(tensors, spec, base)


def identity_of_adapter(tensors: Iterable[TensorDigest], spec: AdapterSpec, base: str) -> str:
    """Return the identity of an adapter of these tensors. `base`: the base's identity."""
    return identity_of(tensors, f"base {base}", f"scale {spec.scale.hex()}")


def weights_identity(base: str, digest: str) -> str:
    """Return the identity of the weights of a policy version.

    Args:
        base: identity of the base of adapters; empty: all weights were sent.
        digest: of what was sent.
    """
    return xxhash.xxh3_128_hexdigest(f"{base} {digest}".encode()) if base else digest


def base_directory(adapter: AdapterDirectory) -> Path | None:
    """Return the directory of the base that an adapter names, of the hub's cache, too; None if it is not here."""
    if not adapter.base:
        return None
    path = Path(adapter.base).expanduser()
    if path.is_dir():
        return path.absolute()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(adapter.base, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None
