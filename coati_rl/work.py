"""Define the items of work that trainers carry out, and the reports of trainers and producers.

A source of work (the coordinator, or a dataset where there are no producers) decides each item once and numbers it.
Every trainer rank carries out the same items in the same order, so no rank can disagree about when weights are synced
or a checkpoint is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from coati_rl.samples import RaggedBatch
from coati_rl.types import CommitResult, Lease


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainWork:
    """Order forward/backward on a mini-batch, and the optimizer step when it is the step's last."""

    batch: RaggedBatch  # of this dp rank
    is_corrected: bool = False  # the step's loss corrects for the engine-trainer mismatch


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatWork:
    """Order another optimizer step on the mini-batches of an earlier one, which the trainers have kept."""

    step: int  # optimizer step, from 0
    first_step: int  # that trained the mini-batches first
    is_last: bool  # no other step on them follows
    learning_rate_progress: float
    is_corrected: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncWork:
    """Order the current weights to be sent to producers."""

    index: int  # number of this item of work
    policy_version: int
    members: tuple[int, ...]  # producer ids
    probe: tuple[int, ...] = ()  # token ids whose log-probabilities verify the sync; none: it is not verified


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeWork:
    """Order a sync's probe to be scored with the experts that a producer's engine chose; the weights are the sync's."""

    policy_version: int
    producer: int
    probe: tuple[int, ...]  # T token ids
    routes: np.ndarray | None  # uint[T, D, K], see `coati_rl.routes`; None: the engine returned none


Side = Literal["producers", "trainers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HandOverWork:
    """Order the devices that producers and trainers share to be handed over: one side gives its memory up first."""

    to: Side
    members: tuple[int, ...]  # producer ids


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveWork:
    """Order a checkpoint of the current weights."""

    step: int  # optimizer steps taken
    data_state: dict[str, Any]  # JSON: the position in the data after that step; see `coati_rl.checkpoint.position`
    rollouts: bytes = b""  # of `coati_rl.checkpoint.untrained_rollouts`, for the dp rank that writes them


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateWork:
    """Order the loss of a part of an evaluation set, without gradient; the set's metrics are due after its last part.

    Only a job on a dataset orders it: with producers, evaluation prompts are answered by the engines.
    """

    name: str  # of the set
    batch: RaggedBatch  # of this dp rank; its step is the number of optimizer steps taken


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceWork:
    """Order a reference model's log-probabilities of a batch, or, without one, that the model be freed."""

    part: int  # its number, in the report
    batch: RaggedBatch | None  # of this dp rank


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishWork:
    """Order the end of the run."""

    step: int


Work = (
    TrainWork | RepeatWork | SyncWork | ProbeWork | HandOverWork | SaveWork | EvaluateWork | ReferenceWork | FinishWork
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Report that an item of work is not decided yet, and what it waits for."""

    reason: str  # a clause with numbers, for display: "waiting for the transfer of version 4 to producer 0"


class WorkList:
    """Keep the items of work by number, each with an entry per dp rank, until every trainer rank has it."""

    KEPT: ClassVar = ("_asked",)

    def __init__(self, *, num_ranks: int, trainers_per_dp_rank: int) -> None:
        self._items: dict[int, Sequence[Work]] = {}
        self._asked = dict.fromkeys(range(num_ranks), 0)  # rank -> the last item it asked for
        self._trainers_per_dp_rank = trainers_per_dp_rank

    def ask(self, index: int, rank: int) -> Work | None:
        """Return an item for a trainer rank, None if it is not decided. The rank has received all earlier items."""
        self._asked[rank] = index
        oldest = min(self._asked.values())
        self._items = {number: item for number, item in self._items.items() if number >= oldest}
        item = self._items.get(index)
        return None if item is None else item[rank // self._trainers_per_dp_rank]

    @property
    def indices(self) -> Sequence[int]:
        """Return the numbers of the items that some rank may ask for."""
        return [*self._items]

    def add(self, index: int, item: Sequence[Work]) -> None:
        """Add an item, with an entry for each dp rank."""
        self._items[index] = item


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """Report how the transfer of a SyncWork ended; the commits follow."""

    index: int
    staged: tuple[int, ...]  # producers that have staged the new weights
    failed: dict[int, str]  # producer -> cause
    seconds: float
    digest: str
    identity: str = ""  # of the weights of this version; empty: not known
    num_bytes: int = 0  # of the tensors that were sent
    problem: str = ""  # the first error, if no producer has staged


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """Report the trainers' log-probabilities of a sync's probe of T tokens, in nats."""

    policy_version: int
    logprobs: np.ndarray  # float32[T - 1]
    reference: np.ndarray | None = None  # the same of float32 compute, where bfloat16 is compared with it
    producer: int | None = None  # with whose routes it was scored, after its commit, by a ProbeWork


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitReport:
    """Report how one producer's commit of staged weights ended."""

    producer: int
    policy_version: int
    error: str | None = None  # the producer is not used any more
    result: CommitResult | None = None  # None when there is an error


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReply:
    """Answer a producer that asks for prompts."""

    leases: tuple[Lease, ...]
    policy_version: int  # at which their first tokens are sampled, or an older one
    is_finished: bool  # no prompt will follow
    reason: str = ""  # why there is no lease
    overdue: tuple[int, ...] = ()  # ids of the producer's leases that the trainers wait for, as others would get stale
