"""Name the calls that an engine makes to a server, which each kind of server has in a form of its own."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from coati_rl.types import GenerationRequest

LOAD_S = 600.0  # to read weights from the disk and to load them, or to digest them
SHORT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """Hold what is known of a server."""

    num_ranks: int  # of its tensor parallelism
    is_sglang: bool = False  # else it is vLLM's
    has_loader: bool = False  # its workers have `LoadingWorker`
    has_seeds: bool = True  # it samples with the seeds of requests
    digest_digits: int = 64  # hexadecimal ones of SHA-256 that it tells of a parameter; 0: it has another digest


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAnswers:
    """Hold what a server has said of itself, before the model is compared."""

    facts: ServerFacts
    problems: Sequence[str]  # of its settings
    parameters: Collection[str]  # names; empty: one of `problems` says why
    vocabulary: Collection[int]  # numbers of tokens that its output heads have
    differing_shapes: Sequence[str] = ()  # of its modules, if it tells them


class ServerCalls(Protocol):
    """Make the calls to one server. Raises: HttpCallError."""

    health_path: str  # answered while it can serve
    generate_path: str

    def begin(self, version: str) -> None:
        """Let it run, since a run that was killed in a commit has paused it, and name its weights."""

    def generate_body(self, request: GenerationRequest, request_id: str, *, max_new_tokens: int) -> dict[str, Any]:
        """Return the body that asks for a request's samples. `request_id`: unique on the server."""

    def bytes_of_token(self, request: GenerationRequest) -> int:
        """Return the size of a sampled token in a reply, at most."""

    def choices(self, reply: dict[str, Any], request: GenerationRequest) -> list[Any]:
        """Return a reply's samples in the form that `read_completions` checks. Raises: ReplyError."""

    def abort(self, request_id: str, num_choices: int, *, timeout_s: float) -> None:
        """Have a request end, which is answered with its tokens so far."""

    def probe_body(self, token_ids: Sequence[int], request_id: str) -> dict[str, Any]:
        """Return the body that asks for the log-probabilities of a prompt, without temperature, cuts and cache."""

    def prompt_logprobs(self, reply: dict[str, Any], token_ids: Sequence[int]) -> np.ndarray:
        """Return float32[T - 1], the log-probabilities of token_ids[1:]. Raises: ReplyError."""

    def pause(self) -> None:
        """Stop between two steps; requests stay, and go on after `resume`."""

    def reload(self, directory: str, version: str) -> None:
        """Load the safetensors files of a directory, and give its weights a name."""

    def checksums(self) -> dict[str, set[str]]:
        """Return the digests that its ranks compute of each parameter, by name."""

    def name(self, version: str) -> None:
        """Name the weights that it has."""

    def resume(self) -> None:
        """Forget what was computed with other weights, and go on. Raises: EngineError too, if it has not forgotten."""
