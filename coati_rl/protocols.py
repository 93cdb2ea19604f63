"""Declare the interfaces of both engines, the source of the trainers' work, and the producers' coordinator.

The code between these interfaces runs, and is tested, without Ray, an inference engine or a training engine.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, Protocol

from coati_rl.batching.packed_group import PackedGroup
from coati_rl.probe import ProbeAnswer
from coati_rl.types import CommitResult, GenerationRequest, GenerationResult, Problem, TokenChunk
from coati_rl.work import CommitReport, LeaseReply, ProbeReport, SyncReport, Wait, Work

if TYPE_CHECKING:  # the coordinator and the driver have no torch, which takes 200 MiB
    import torch

    from coati_rl.transport.manifest import WeightManifest
    from coati_rl.transport.rendezvous import Rendezvous

OnTokens = Callable[[TokenChunk], None]


class GenerationEngine(Protocol):
    """Generate responses: vLLM, transformers or the deterministic fake engine.

    All methods may be called from any thread and return at once, except where a `timeout_s` bounds the wait.
    """

    policy_version: int  # of the serving weights

    def submit(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> "Future[GenerationResult]":
        """Queue a request. Raises: EngineError if the engine has ended, the id is in use, or the episode is not open.

        Args:
            on_tokens: gets the tokens of each sample as they are sampled, before the future is resolved. It and the
                future's callbacks run on the engine's thread, and must be quick.

        Returns: a future, resolved exactly once: with the result, or with an EngineError when the engine ends. It
            cannot be cancelled; see `abort`.
        """

    def submit_all(self, requests: Sequence[GenerationRequest]) -> "list[Future[GenerationResult]]":
        """Queue requests so that none begins before the others are there. Raises: as `submit`.

        What is computed together then does not depend on when each one arrives, nor do the last bits of its sums.
        """

    def abort(self, request_id: str) -> None:
        """End a request before the engine's next step: its future gets the tokens sampled so far.

        Their finish reason is "abort". No effect on a request that is finished or unknown, and on an ended engine.
        """

    def num_sequences(self) -> int:
        """Return the number of samples of requests with an open future: running, or waiting to run."""

    def check_alive(self) -> None:
        """Raise EngineError if the engine has ended; for callers without an open future."""

    def open_episode(self, episode_id: str) -> None:
        """Open an episode for requests. Raises: EngineError if the engine has ended, or the id is in use.

        From the admission of its first request until `close_episode`, weights are not swapped except in flight, also
        while none of its requests is running. A request without an episode id is an episode of its own.
        """

    def close_episode(self, episode_id: str) -> None:
        """End an episode. No effect on one that is not open."""

    def stage_weights(
        self, manifest: "WeightManifest", rendezvous: "Rendezvous", *, timeout_s: float
    ) -> tuple[str, ...]:
        """Receive an update without changing the serving weights; blocks until received.

        Returns: the digest of the received bytes, one per tensor-parallel rank.
        Raises: TransferError; the old weights continue to serve and the staged bytes are freed.
        """

    def commit_weights(self, policy_version: int, *, in_flight: bool, timeout_s: float) -> tuple[str, ...]:
        """Swap the staged weights in and reset the prefix cache.

        Args:
            in_flight: swap between two engine steps; running requests continue with the new weights, and each token
                has the policy version that sampled it. Else swap when no request runs and no episode is open; new
                episodes wait until then, and the next turns of open ones do not.
        Returns: the identity of the weights that serve now, of each rank that has received them.
        Raises: EngineError if this version is not staged, or requests still run at the deadline, or episodes are still
            open, which it names.
        """

    def sleep(self, *, timeout_s: float) -> None:
        """Give up the memory of weights and caches before the next step, until the next commit.

        Weights can be staged meanwhile. Requests wait, those that are running, too. Raises: EngineError.
        """

    def probe(self, token_ids: Sequence[int], *, timeout_s: float) -> ProbeAnswer:
        """Return log-probabilities, nats at temperature 1, of token_ids[1:] under the serving weights, and the routes.

        Raises: EngineError.
        """

    def close(self) -> None:
        """Stop threads and child processes."""


# The trained model; the policy before the update; that of the KL penalty; that which the policy is distilled from.
Role = Literal["policy", "value", "old", "reference", "teacher"]


class LossFn(Protocol):
    """Compute a loss from the current log-probabilities, or from the values of a model with a scalar head."""

    @property
    def is_token_separable(self) -> bool:
        """Return True if the term of a token depends on that token's arrays alone.

        The loss may then be evaluated on any subset of tokens and added up. False for a loss whose terms depend on
        other tokens, as a ratio of whole sequences does.
        """

    def is_final(self, sums: "Mapping[str, torch.Tensor]") -> bool:
        """Return False if the sums of an evaluation by tokens show that a sample has to be evaluated as a whole.

        The loss is then evaluated again, on whole samples.
        """

    def __call__(
        self, logprobs: "torch.Tensor", entropy: "torch.Tensor", micro_batch: "dict[str, torch.Tensor]"
    ) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
        """Compute the loss of float32[R, M] log-probabilities and entropies, both with gradient.

        Of a scalar head `logprobs` are its values, 0 where the mask is False, and entropies are 0.
        Returns: (float32[] summed loss, sums to report).
        """


class ProducerCoordinator(Protocol):
    """Declare the coordinator's methods for producers; see `coati_rl.coordinator.coordinator.Coordinator`."""

    def lease(self, producer_id: int, *, max_prompts: int, timeout_s: float, is_drained: bool) -> LeaseReply:
        """Lease up to `max_prompts` prompts to roll out.

        If `is_drained`, nothing is generating, so that a commit need not wait: prompts may be leased before it.
        """

    def put(self, producer_id: int, groups: Sequence[PackedGroup]) -> int:
        """Deliver finished groups. Returns: the number accepted."""

    def fail(self, producer_id: int, lease_id: int, cause: str) -> None:
        """Report that a prompt could not be rolled out."""

    def rejoin(self, producer_id: int, held: Sequence[int]) -> tuple[int, ...]:
        """Say which leases the producer holds, after a CoordinatorReplacedError of another call.

        Returns: those of them that are void.
        """


class SyncReports(Protocol):
    """Declare the reports of a weight sync; see `coati_rl.coordinator.coordinator.Coordinator`."""

    def report_probe(self, report: ProbeReport) -> None:
        """Report the trainers' log-probabilities of a sync's probe; without a ProbeWork before `report_sync`."""

    def report_sync(self, report: SyncReport) -> None:
        """Report that the transfer of a weight sync has ended."""

    def report_commit(self, report: CommitReport) -> None:
        """Report that a producer's commit has ended."""


class WorkSource(Protocol):
    """Decide what trainers do next: the coordinator of a run with producers, or a dataset of one without.

    It does not depend on the results of the work, so that a dataset on each rank can be a source. Trainers report to
    `StepReports`, of which a run has one. A source ends the run with a FinishWork, and one without producers has no
    SyncWork.
    """

    def next_work(self, index: int, *, rank: int, timeout_s: float) -> Work | Wait:
        """Return item `index`, from 0, for a trainer rank; the reason if it is not decided within `timeout_s`.

        Every rank gets the same kind of item under a number, with its dp rank's batch, however often it asks. A rank
        that asks for an item has received all earlier ones.
        Raises: RunError when the run cannot continue.
        """


class StepReports(Protocol):
    """Receive the reports of trainers."""

    def report_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Report the metrics of finished optimizer step `step`, from 0; called by one rank."""

    def report_saved(self, step: int, path: str) -> None:
        """Report that the checkpoint after `step` optimizer steps is complete; called by rank 0."""


class TrainerCoordinator(WorkSource, StepReports, SyncReports, Protocol):
    """Declare the coordinator's methods for trainers; see `coati_rl.coordinator.coordinator.Coordinator`."""


class WeightReceiver(Protocol):
    """Declare a producer's methods for the weight publisher; the producer may be dead or hung."""

    def stage_weights(
        self, manifest: "WeightManifest", rendezvous: "Rendezvous", *, timeout_s: float
    ) -> tuple[str, ...]:
        """Stage an update. Returns: a digest per rank. Raises: TransferError; PeerLostError if the producer is lost."""

    def sleep(self, *, timeout_s: float) -> None:
        """Put the engine to sleep; see `GenerationEngine.sleep`. Raises: as `stage_weights`."""

    def commit_weights(self, policy_version: int, probe: Sequence[int], *, timeout_s: float) -> CommitResult:
        """Commit the staged weights, and score `probe` with them unless it is empty. Raises: as `stage_weights`."""


class GroupScorer(Protocol):
    """Score the episodes of one group in the background."""

    def submit(self, responses: Sequence[str], problem: Problem) -> Any:
        """Score the text of each episode's last turn, G of them.

        Returns: a concurrent.futures.Future of list[Score], one of each episode.
        """

    def close(self) -> None:
        """Stop the workers."""
