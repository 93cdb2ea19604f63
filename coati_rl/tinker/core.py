"""Say what a server of Tinker's API asks of the part that computes: many models on one frozen base.

A model is a set of adapters, or a whole copy of the weights. The part that trains and the one that samples are other
packages' (`consumer`, `producer`); what crosses are token ids, arrays by name, and directories.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class RequestError(Exception):
    """Report that a request is wrong, so that repeating it cannot help. The message names field, value and remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Say what a model trains."""

    rank: int = 32  # of its adapters; 0: all weights
    seed: int = 0  # of A; B begins as 0
    trains_attention: bool = True
    trains_mlp: bool = True
    trains_head: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Datum:
    """Hold one sequence: position i sees tokens 0 to i and predicts `target_tokens[i]`."""

    tokens: npt.NDArray[np.int64]  # [N]
    inputs: Mapping[str, np.ndarray]  # target_tokens int64[N] or [N, K], and what the loss needs in the same shape


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRequest:
    """Ask for the log-probabilities of data, and for the gradient of a summed loss."""

    model: str
    data: Sequence[Datum]
    loss: str  # name: cross_entropy, importance_sampling, ppo, cispo, dro, gspo
    settings: Mapping[str, float | str] = field(default_factory=dict)
    is_forward_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LossResult:
    """Hold a loss request's answer."""

    logprobs: Sequence[Floats]  # in nats, of each datum in the shape of its target_tokens
    metrics: Mapping[str, float]  # names are NAME:REDUCTION; "loss:sum" is there


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamStep:
    """Hold the numbers of one AdamW step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0: no clipping


class TrainingCore(Protocol):
    """Train models; calls come one at a time, in the order in which they are to be done."""

    max_tokens: int  # of a datum
    vocab_size: int

    def create(self, model: str, spec: ModelSpec) -> None:
        """Add a model. Raises: RequestError."""

    def check(self, request: LossRequest) -> None:
        """Refuse a request that cannot be computed, without computing. Raises: RequestError."""

    def forward_backward(self, requests: Sequence[LossRequest]) -> list[LossResult | RequestError]:
        """Answer requests of any models in common forward and backward passes; gradients add up until a step.

        The answers to one model's requests do not depend on the others' by a bit.
        """

    def optim_step(self, model: str, step: AdamStep) -> dict[str, float]:
        """Take a step on the summed gradient, and clear it. Returns: metrics, such as "grad_norm:mean"."""

    def save(self, model: str, directory: Path, *, with_optimizer: bool) -> None:
        """Write a checkpoint: PEFT's files for adapters, Hugging Face's for whole weights, and the state of Adam."""

    def load(self, model: str, directory: Path, *, with_optimizer: bool) -> None:
        """Add or replace a model by a checkpoint; its gradient is empty. Raises: RequestError if it does not fit."""

    def drop(self, model: str) -> None:
        """Free a model's memory."""

    def close(self) -> None:
        """End the processes that this part started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """Ask for continuations of one prompt."""

    sampler: str  # name of `SamplingCore.publish`; "": the base model
    prompt: Sequence[int]
    num_samples: int = 1
    max_tokens: int | None = None  # None: to the end of the context
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None  # sample i has the random state of (seed, i)
    stop_ids: Sequence[int] | None = None  # None: the model's end tokens
    stop_texts: Sequence[str] = ()
    wants_prompt_logprobs: bool = False
    top_k_prompt_logprobs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSequence:
    """Hold one continuation."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]  # nats at temperature 1, before top-k and top-p: what the trainer computes
    has_stopped: bool  # by a stop; else by its length


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleResult:
    """Hold a sample request's answer; of the prompt's first token there is no log-probability: NaN."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Floats | None = None  # [P]
    top_k_prompt: tuple[npt.NDArray[np.int32], Floats] | None = None  # token ids and log-probabilities [P, K]


def check_prompt(request: SampleRequest, *, max_tokens: int, vocab_size: int) -> None:
    """Raise RequestError for a prompt that leaves no room for a token, or has one that the model lacks."""
    length = len(request.prompt)
    if not 1 <= length < max_tokens:
        raise RequestError(f"prompt: {length} tokens; give 1 to {max_tokens - 1}, so that one can follow")
    if min(request.prompt) < 0 or max(request.prompt) >= vocab_size:
        raise RequestError(f"prompt: token ids are from 0 to {vocab_size - 1}")


class SamplingCore(Protocol):
    """Sample from published models; requests that wait together are answered together."""

    def publish(self, sampler: str, directory: Path) -> None:
        """Serve a checkpoint of `TrainingCore.save` under a name that was never used before."""

    def withdraw(self, sampler: str) -> None:
        """Free a sampler's memory."""

    def check(self, request: SampleRequest) -> None:
        """Refuse a request that cannot be answered. Raises: RequestError."""

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Answer a request; cancelling the call stops it."""

    async def close(self) -> None:
        """End the engines."""
