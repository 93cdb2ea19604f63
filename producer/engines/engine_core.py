"""Declare the interface that an engine backend implements; `ThreadedEngine` calls its methods on one thread.

In: requests, weight updates and probes, between two steps. Out: results.
"""

from collections.abc import Callable
from typing import Protocol

from coati_rl.probe import ProbeAnswer
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import GenerationRequest, GenerationResult
from producer.engines.token_stream import TokenStream


class EngineCore(Protocol):
    """Define a backend's methods, called on the owner thread; it survives a CoatiError and no other exception."""

    policy_version: int  # of the weights that serve now; set before `load`, then by `commit`
    identities: tuple[str, ...]  # of the weights that the last commit has put in place, by rank; empty before
    vocab_size: int  # valid after `load`
    max_model_len: int

    def load(self) -> None:
        """Load the model; called once, before all other methods."""

    def add(self, request: GenerationRequest, stream: TokenStream | None) -> None:
        """Queue a request; its tokens are sent to `stream` as they are sampled. Raises: RequestRefusedError."""

    def abort(self, request_id: str) -> GenerationResult | None:
        """Abort a request. Returns: its tokens so far, see `GenerationResult`; None if it is not running."""

    def num_running(self) -> int:
        """Return the number of unfinished requests and probes; `step` is called while it is positive."""

    def step(self) -> list[GenerationResult]:
        """Run one step of the model. Returns: the results of finished requests."""

    def probe(self, token_ids: tuple[int, ...], answer: Callable[[ProbeAnswer], None]) -> None:
        """See `GenerationEngine.probe`; `answer` is called now or in a later step."""

    def start_staging(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        """Check the manifest against the model and start receiving, without blocking. Raises: TransferError."""

    def poll_staging(self) -> tuple[str, ...] | None:
        """Return the digests, one per rank, once all ranks have received; None before. Raises: TransferError."""

    def sleep(self) -> list[GenerationResult]:
        """Free the memory of weights and caches.

        Returns: results of a step that had begun. Requests that go on after the next commit compute their caches again.
        """

    def wake(self) -> None:
        """Allocate weights again; they are of any value until the commit that follows, which allocates the caches."""

    def commit(self, policy_version: int) -> list[GenerationResult]:
        """Load the staged weights and clear all caches; running requests continue with the new weights.

        Returns: results that finished before the swap, in a step that had begun.
        """

    def close(self) -> None:
        """Release processes, sockets and memory."""
