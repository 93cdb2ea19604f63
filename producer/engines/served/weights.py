"""Give a server new weights: write them as a safetensors file on a disk that it shares, and have it load that.

In: a staged update. Out: the proof that the server has loaded it. A server whose workers have `LoadingWorker` digests
what it reads, as engines of a run do. Another one is asked for the SHA-256 of its parameters afterwards, which are
compared where it holds a tensor as it is in the file: embeddings and norms, and on GPUs what vLLM does not join. The
probe of the sync compares the log-probabilities, in which all weights are.
"""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from coati_rl.errors import EngineError
from coati_rl.http_call import HttpCallError
from coati_rl.tensor_bytes import bytes_of
from coati_rl.transport.wire import StagedWeights
from producer.engines.served.calls import LOAD_S, ServerCalls, ServerFacts
from producer.engines.served.server import Server

_PADDED_TO = 64  # rows of embeddings in vLLM
_EMPTY = hashlib.sha256().hexdigest()  # of a parameter that the CPU build has packed elsewhere


class ServedWeights:
    """Hold the directory of a server's updates, one at a time."""

    def __init__(self, server: Server, calls: ServerCalls, directory: Path, facts: ServerFacts, *, dtype: str) -> None:
        """Remove what an earlier producer has left there. `dtype`: of the server's weights."""
        self._server, self._calls, self._directory, self._facts = server, calls, directory, facts
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._written: StagedWeights | None = None
        self._digests: dict[str, set[str]] = {}  # SHA-256 of the tensors that were written, padded or not
        shutil.rmtree(directory, ignore_errors=True)

    def write(self, staged: StagedWeights) -> None:
        """Write an update, unless it is written. Raises: EngineError."""
        if self._written is staged:
            return
        self.remove()
        target = self._path(staged)
        try:
            target.mkdir(parents=True)
            tensors = {name: tensor.contiguous() for name, tensor in staged.tensors}
            save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the weights for {self._server.url} cannot be written to {target}: {error}") from error
        self._written = staged
        if not self._facts.has_loader and self._facts.digest_digits:
            self._digests = {name: self._digests_of(tensor) for name, tensor in staged.tensors}

    def load(self, staged: StagedWeights, version: str) -> str:
        """Have the server serve an update; running requests go on with it.

        Args:
            staged: which was written.
            version: that the server gives to tokens from now on.
        Returns: the digest of what it has loaded.
        Raises: EngineError; the server may then have any weights.
        """
        path = self._path(staged)
        try:
            self._calls.pause()
            # The proof comes last: a server that ends here and is started again has neither the weights nor their name.
            if self._facts.has_loader:
                names = json.dumps([name for name, _ in staged.tensors])
                self._ask_ranks(staged, "coati_load", str(path / "model.safetensors"), names)
                self._calls.name(version)
                self._ask_ranks(staged, "coati_loaded")
            else:
                self._calls.reload(str(path), version)
                self._compare_checksums(staged)
            self._calls.resume()
        except HttpCallError as error:
            raise EngineError(
                f"{self._server.url} has not loaded version {staged.policy_version} from {path}, which it must reach "
                f"under this path: {error}"
            ) from error
        self.remove()
        return staged.digest

    def remove(self) -> None:
        """Remove the files of an update."""
        self._written = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def _path(self, staged: StagedWeights) -> Path:
        return self._directory / f"version-{staged.policy_version}"

    def _ask_ranks(self, staged: StagedWeights, method: str, *arguments: str) -> None:
        """Call a method of `LoadingWorker` that returns the digest of what it has loaded."""
        call = {"method": method, "args": list(arguments)}
        found = self._server.post("/collective_rpc", call, timeout_s=LOAD_S).get("results")
        if not isinstance(found, list) or set(found) != {staged.digest}:
            raise self._stale(staged, f"its ranks say {found}, sent was {staged.digest}")

    def _compare_checksums(self, staged: StagedWeights) -> None:
        digits = self._facts.digest_digits
        if not digits:
            return  # the probe of the sync compares the log-probabilities
        found = self._calls.checksums()
        is_whole = self._facts.num_ranks == 1
        names = [
            n for n in self._digests if n in found and found[n] != {_EMPTY} and (is_whole or n.endswith("norm.weight"))
        ]
        differ = [name for name in names if not found[name] <= {own[:digits] for own in self._digests[name]}]
        if differ or not names:
            raise self._stale(
                staged, f"{len(differ)} of {len(names)} parameters differ, such as {min(differ, default='')}"
            )

    def _stale(self, staged: StagedWeights, reason: str) -> EngineError:
        return EngineError(
            f"{self._server.url} has stale weights: it was told to load version {staged.policy_version} and has not: "
            f"{reason}"
        )

    def _digests_of(self, tensor: torch.Tensor) -> set[str]:
        own = tensor.to(self._dtype)
        return {_sha256(own)} | ({_sha256(_padded(own))} if own.ndim == 2 and len(own) % _PADDED_TO else set())


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a matrix with rows of zeros up to a multiple of 64, as vLLM has embeddings."""
    rows = -len(tensor) % _PADDED_TO
    return torch.cat([tensor, tensor.new_zeros(rows, tensor.shape[1])])


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor.contiguous())).hexdigest()
