"""Define the items of work that trainers carry out, and what they and producers report.

A source of work (the coordinator, or a dataset where there are no producers) decides each item once and numbers it.
Every trainer rank carries out the same items in the same order, so no rank can disagree about when weights are synced
or a checkpoint is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coati_rl.samples import RaggedBatch
from coati_rl.types import CommitResult, Lease


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainWork:
    """Forward/backward on a mini-batch, and the optimizer step when it is the step's last."""

    batch: RaggedBatch  # this dp rank's share
    is_corrected: bool = False  # the step's loss corrects for the engine-trainer gap


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncWork:
    """Send the current weights to producers."""

    index: int  # number of this item of work
    policy_version: int
    members: tuple[int, ...]  # producer ids
    probe: tuple[int, ...] = ()  # token ids whose log-probabilities prove the sync; none: it is not proved


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveWork:
    """Write a checkpoint of the current weights."""

    step: int  # optimizer steps taken
    data_state: dict[str, Any]  # JSON: where the data stands after that step; see `coati_rl.checkpoint.position`
    rollouts: bytes = b""  # of `coati_rl.checkpoint.kept_rollouts`, for the dp rank that writes them


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishWork:
    """The run is over."""

    step: int


Work = TrainWork | SyncWork | SaveWork | FinishWork


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Say that an item of work is not decided yet, and what it waits for."""

    reason: str  # a clause for people, with numbers: "waiting for the transfer of version 4 to producer 0"


class WorkList:
    """Keep the items of work by number, each with an entry per dp rank, until every trainer rank has it."""

    def __init__(self, *, num_ranks: int, ranks_per_dp_group: int) -> None:
        self._items: dict[int, Sequence[Work]] = {}
        self._asked = dict.fromkeys(range(num_ranks), 0)  # rank -> the item it asked for last
        self._ranks_per_dp_group = ranks_per_dp_group

    def ask(self, index: int, rank: int) -> Work | None:
        """Return a trainer rank's share of an item, None if it is not decided. Who asks has the items before."""
        self._asked[rank] = index
        oldest = min(self._asked.values())
        self._items = {number: item for number, item in self._items.items() if number >= oldest}
        item = self._items.get(index)
        return None if item is None else item[rank // self._ranks_per_dp_group]

    def add(self, index: int, item: Sequence[Work]) -> None:
        """Note what an item is, with a share for each dp rank."""
        self._items[index] = item


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """Describe how the transfer of a SyncWork ended; the commits follow."""

    index: int
    staged: tuple[int, ...]  # producers that hold the new weights beside those that they serve
    failed: dict[int, str]  # producer -> cause
    seconds: float
    digest: str
    problem: str = ""  # what went wrong first, if nobody has staged


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitReport:
    """Describe how one producer's commit of staged weights ended."""

    producer: int
    policy_version: int
    error: str | None = None  # the producer is of no further use
    result: CommitResult | None = None  # None when there is an error


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReply:
    """Describe what a producer gets when it asks for prompts."""

    leases: tuple[Lease, ...]
    policy_version: int  # of the weights that sample their first tokens, or older than these
    is_finished: bool  # no prompt will ever come again
    reason: str = ""  # why there is no lease
