"""Declare what a backend implements to become an engine; `ThreadedEngine` calls all of it on one thread.

In: requests, weight updates and probes, between two steps. Out: results.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import GenerationRequest, GenerationResult
from producer.engines.token_stream import TokenStream


class EngineCore(Protocol):
    """Describe what a backend does, on the owner thread. A CoatiError leaves it as it was; any other exception ends
    it.
    """

    policy_version: int  # of the weights that serve now; set before `load`, then by `commit`
    vocab_size: int  # valid after `load`
    max_model_len: int

    def load(self) -> None:
        """Load the model; called once, first."""

    def add(self, request: GenerationRequest, stream: TokenStream | None) -> None:
        """Queue a request; `stream` gets its tokens as they are sampled. Raises: RequestRefusedError."""

    def abort(self, request_id: str) -> GenerationResult | None:
        """End a request and return what it has so far, see `GenerationResult`; None if it is not running."""

    def num_running(self) -> int:
        """Count requests that are unfinished and probes that are unanswered: while there are any, `step` is called."""

    def step(self) -> list[GenerationResult]:
        """Make some progress; returns what finished."""

    def probe(self, token_ids: tuple[int, ...], answer: Callable[[np.ndarray], None]) -> None:
        """See `GenerationEngine.probe_logprobs`; `answer` is called now or in a later step."""

    def start_staging(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        """Check the manifest against the model and begin to receive, without blocking. Raises: TransferError."""

    def poll_staging(self) -> tuple[str, ...] | None:
        """Digests, one per rank, once all ranks have received; None before. Raises: TransferError."""

    def commit(self, policy_version: int) -> list[GenerationResult]:
        """Load the staged weights and forget all that was computed under the old ones; what runs goes on under them.

        Returns: what finished before, in a step that had begun.
        """

    def close(self) -> None:
        """Release processes, sockets and memory."""
