"""Declare the seams: the two engines, the source of the trainers' work, and what producers ask of the coordinator.

Everything between them runs, and is tested, without Ray, without an inference engine and without a training engine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.data.packed_group import PackedGroup
from coati_rl.transport.manifest import TensorEntry, WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import CommitResult, GenerationRequest, GenerationResult, Problem, TokenChunk
from coati_rl.work import CommitReport, LeaseReply, SyncReport, Wait, Work

OnTokens = Callable[[TokenChunk], None]


class GenerationEngine(Protocol):
    """Generates; vLLM, transformers or the shipped deterministic fake.

    All methods may be called from any thread and return at once, except where a `timeout_s` bounds the wait.
    """

    policy_version: int  # of the weights that serve now

    def submit(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> "Future[GenerationResult]":
        """Queue a request. Raises: EngineError if the engine has ended, the id is in use, or the episode is not open.

        Args:
            on_tokens: gets the tokens of each sample as they come, before the future is resolved. It and the future's
                callbacks run on the engine's thread, and must be quick.

        Returns: a future, resolved exactly once: with the result, or with an EngineError when the engine ends. It
            cannot be cancelled; see `abort`.
        """

    def abort(self, request_id: str) -> None:
        """End a request before the engine's next step: its future gets the tokens sampled so far.

        Their finish reason is "abort". Harmless for a request that is finished or unknown, and on an engine that ended.
        """

    def num_sequences(self) -> int:
        """Samples of the requests whose future is open: running, or waiting to run."""

    def check_alive(self) -> None:
        """Raise EngineError if the engine has ended; for callers that wait for no future."""

    def open_episode(self, episode_id: str) -> None:
        """Let requests name this episode as theirs. Raises: EngineError if the engine has ended, or the id is in use.

        From the admission of its first request until `close_episode`, weights are not swapped except in flight, also
        while none of its requests is running. A request that names no episode is an episode of its own.
        """

    def close_episode(self, episode_id: str) -> None:
        """End an episode. Harmless for one that is not open."""

    def stage_weights(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> tuple[str, ...]:
        """Receive an update beside the serving weights, which stay untouched; blocks until received.

        Returns: the digest of the received bytes, one per tensor-parallel rank.
        Raises: TransferError; the old weights go on serving and the staged bytes are gone.
        """

    def commit_weights(self, policy_version: int, *, in_flight: bool, timeout_s: float) -> None:
        """Swap the staged weights in and reset the prefix cache.

        Args:
            in_flight: swap between two engine steps; running requests go on under the new weights, and each token
                carries the version that sampled it. Else swap when no request runs and no episode is open; new
                episodes wait until then, and the next turns of open ones do not.
        Raises: EngineError if this very version is not staged, or requests still run when the time is over, or episodes
            are still open, which it names.
        """

    def probe_logprobs(self, token_ids: Sequence[int], *, timeout_s: float) -> np.ndarray:
        """Log-probabilities, nats at temperature 1, of token_ids[1:] under the weights that serve now.

        Returns: float32[T - 1]; float32[0] from an engine that has none. Raises: EngineError.
        """

    def close(self) -> None:
        """Stop threads and child processes."""


Role = Literal["policy", "old", "reference"]  # of a model: trained; the policy before the update; of the KL penalty


class TrainerLayout(Protocol):
    """Describe what a rank has to do for all, by its place in the layout of the trainers."""

    @property
    def is_reporter(self) -> bool:
        """True on the one rank that reports a step's metrics."""

    @property
    def is_first_copy(self) -> bool:
        """True on the ranks that hold the first copy of the policy's weights."""

    @property
    def sender(self) -> int | None:
        """This rank's number among those that send the weights, from 0; None if it only helps to gather them."""

    @property
    def num_senders(self) -> int:
        """The number of ranks that send the weights."""


class TrainBackend(Protocol):
    """Trains: the models of a run on ColossalAI, FSDP2 or plain torch; see `consumer.backend.Backend`.

    The backend alone knows stages, shards and schedules; above it a gradient is always the plain sum over the global
    batch. All methods are collective over the trainers, except where a rank is told that it has nothing to do.
    """

    @property
    def layout(self) -> TrainerLayout:
        """This rank's place."""

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""

    def score(self, micro_batches: Sequence[MicroBatch], model: Role = "policy") -> list[torch.Tensor]:
        """Log-probabilities at the sampling temperature of one of the models; no gradient.

        Returns: a float32[R, M] per micro-batch; nothing on ranks without the LM head, where no loss is computed.
        """

    def keep_old_policy(self) -> None:
        """The policy as it is now becomes the "old" one that `score` knows."""

    def forward_backward(self, mini_batch: MiniBatch, loss_fn: "LossFn") -> dict[str, "torch.Tensor"]:
        """Accumulate the gradient of the summed loss over the mini-batch; reduced over ranks with the last one.

        Returns: the sums that `loss_fn` reports, added over micro-batches of this rank (maxima for keys `*_max`); none
            on ranks without the LM head.
        """

    def reduce_sums(self, sums: dict[str, "torch.Tensor"]) -> dict[str, float]:
        """A step's sums over all ranks; empty on ranks without the LM head."""

    def optimizer_step(self, *, loss_scale: float, learning_rate: float) -> float:
        """Scale the gradient, clip it to the configured norm and step. Returns the norm before clipping.

        With a scale of 0, of a step without samples, no weight changes.
        """

    def weight_entries(self) -> tuple[TensorEntry, ...]:
        """What all senders together export, in HF order and wire dtype; the same on every rank, not collective."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This pipeline stage's full HF tensors in HF order and wire dtype; a tied lm_head is left out."""

    def broadcast_text(self, text: str | None) -> str:
        """Hand a text from sender 0 to all senders; collective over them. `text`: None on the others."""

    def live_weights(self) -> list[torch.Tensor]:
        """The policy's weights that this rank holds, the tensors themselves; not collective."""

    def any_rank(self, is_needed: bool) -> bool:
        """True if a forward is needed on any of the ranks that have to run it together; collective over them."""

    def save(self, directory: Path, *, state: dict[str, Any], files: Mapping[str, bytes]) -> None:
        """Write a HF checkpoint plus optimizer state and further files by name, published atomically."""

    def restore(self, directory: Path) -> None:
        """Take over optimizer and random state of a checkpoint, from any layout, that the weights were loaded from."""

    def close(self) -> None:
        """Leave the process groups that were made for this backend."""


class LossFn(Protocol):
    """The token terms of a loss, given the current log-probabilities."""

    @property
    def is_token_separable(self) -> bool:
        """The term of a token depends on that token's arrays alone.

        The loss may then be evaluated on any subset of tokens and added up. False for a loss whose terms see other
        tokens, as a ratio of whole sequences does.
        """

    def is_final(self, sums: Mapping[str, torch.Tensor]) -> bool:
        """False if the report, of an evaluation by tokens, shows that a sample has to be judged as a whole after all.

        The loss is then evaluated again, on whole samples.
        """

    def __call__(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, micro_batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """From float32[R, L] log-probabilities and entropies, both with gradient, to a loss.

        Returns: (float32[] summed loss, sums to report).
        """


class ProducerCoordinator(Protocol):
    """Describe what a producer asks of the coordinator; see `coati_rl.coordinator.coordinator.Coordinator`."""

    def lease(self, producer_id: int, *, max_prompts: int, timeout_s: float, is_drained: bool) -> LeaseReply:
        """Up to `max_prompts` prompts to roll out.

        Args:
            is_drained: True if nothing is generating, so that a commit will not wait: prompts may then be had ahead of
                it, for the weights that it brings.
        """

    def put(self, producer_id: int, groups: Sequence[PackedGroup]) -> int:
        """Hand in finished groups."""

    def fail(self, producer_id: int, lease_id: int, cause: str) -> None:
        """Give a prompt up."""


class SyncReports(Protocol):
    """Describe what the coordinator hears of a weight sync; see `coati_rl.coordinator.coordinator.Coordinator`."""

    def report_probe(self, policy_version: int, logprobs: np.ndarray) -> None:
        """Take what the trainers' weights say of a sync's probe, float32[T - 1]; before the report of the transfer."""

    def report_sync(self, report: SyncReport) -> None:
        """The transfer of a weight sync has ended."""

    def report_commit(self, report: CommitReport) -> None:
        """A producer's commit has ended."""


class WorkSource(Protocol):
    """Decide what trainers do next: the coordinator of a run with producers, or a dataset where there are none.

    It is asked for work and hears nothing of its results, so that a dataset on each rank is enough of a source. What
    trainers report goes to `StepReports`, of which a run has one. A source ends the run with a FinishWork, and one
    without producers hands out no SyncWork.
    """

    def next_work(self, index: int, *, rank: int, timeout_s: float) -> Work | Wait:
        """Return item `index`, from 0, for a trainer rank; the reason if it is not decided within `timeout_s`.

        Every rank gets the same kind of item under a number, as its dp group's share, however often it asks. Who asks
        for an item has all those before.
        Raises: RunError when the run cannot go on.
        """


class StepReports(Protocol):
    """Hear what trainers have done."""

    def report_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Take the metrics of optimizer step `step`, from 0, when it is done; from one rank."""

    def report_saved(self, step: int, path: str) -> None:
        """Note that the checkpoint after `step` optimizer steps is complete; from rank 0."""


class TrainerCoordinator(WorkSource, StepReports, SyncReports, Protocol):
    """Describe what a trainer of a run with producers needs; see `coati_rl.coordinator.coordinator.Coordinator`."""


class WeightReceiver(Protocol):
    """A producer as the weight publisher sees it: remote, and perhaps dead or hung."""

    def stage_weights(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> tuple[str, ...]:
        """Returns: one digest per rank. Raises: TransferError if it failed, PeerLostError if the producer is gone."""

    def commit_weights(self, policy_version: int, probe: Sequence[int], *, timeout_s: float) -> CommitResult:
        """Serve the staged weights, and score `probe` with them unless it is empty. Raises as `stage_weights`."""


class GroupScorer(Protocol):
    """Scores the episodes of one group in the background."""

    def submit(self, responses: Sequence[str], problem: Problem) -> Any:
        """Score the text of each episode's last turn, G of them.

        Returns: a concurrent.futures.Future of list[Score], one of each episode.
        """

    def close(self) -> None:
        """Stop the workers."""
