"""Note the coordinator's decisions in the run's ledger, each as it is made.

Decisions about training prompts and groups, steps, weights and checkpoints; evaluations are repeated after a resume,
and are not noted. `ledger_resume` reads what a resumption uses, the rest says what the run did up to its last second.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from coati_rl.batching.packed_group import PackedGroup, as_packed
from coati_rl.checkpoint.ledger_files import CHECKPOINT
from coati_rl.checkpoint.ledger_frames import Record
from coati_rl.checkpoint.ledger_resume import (
    FAILED,
    FINISHED,
    LEASED,
    NAMED,
    TAKEN_OVER,
    RecoveredRollouts,
    base_record,
    finished_record,
    start_records,
    state_record,
)
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.checkpoint.position import Position
from coati_rl.coordinator.leases import LeaseTable, OpenLease
from coati_rl.coordinator.membership import Membership
from coati_rl.types import Lease, RolloutGroup

__all__ = ["FAILED", "FINISHED", "LEASED", "Ledger"]

Describe = Callable[[], tuple[Any, Mapping[str, RolloutGroup]]]  # the state as JSON, and the groups that it names

_TIMEOUT_S = 20.0  # for which a step waits for the disk


class Ledger:
    """Note decisions; called under the coordinator's lock, but for `room`, `wait_...` and `flush`.

    Without a writer nothing is noted, and nothing waited for.
    """

    def __init__(self, writer: LedgerWriter | None, members: Membership, identities: dict[int, str]) -> None:
        """Take the writer; `identities`: of weights, by policy version, as syncs add them."""
        self._writer = writer
        self._members = members
        self._identities = identities
        self._describe: Describe | None = None
        self._not_durable: dict[str, int] = {}  # uid of a finished group -> its record

    @property
    def problem(self) -> str | None:
        """Return why it can no longer be written; None while it can."""
        return None if self._writer is None else self._writer.problem

    def start(
        self,
        position: Position,
        recovered: RecoveredRollouts | None,
        describe: Describe,
        lock: AbstractContextManager[Any],
        *,
        has_changed: bool,
    ) -> None:
        """Begin the ledger of a run, or of its resumption, which replaces what was there.

        Args:
            position: at which the run begins.
            recovered: of the ledger before.
            describe: returns the coordinator's state, and the groups that it names.
            lock: under which the state changes.
            has_changed: True if settings or data are not the checkpoint's.
        """
        if self._writer is not None:
            records = [*start_records(position, recovered, has_changed=has_changed), *self._named_groups(describe)]
            self._writer.begin(records, is_start=True, step=position.step)
            self._keep_state(self._writer, describe, lock)

    def take_over(self, describe: Describe, lock: AbstractContextManager[Any]) -> None:
        """Go on with the ledger of a coordinator that has ended; see `start`."""
        if self._writer is not None:
            self._writer.take_over([Record(kind=TAKEN_OVER, fields={}).to_bytes])
            self._keep_state(self._writer, describe, lock)

    def _keep_state(self, writer: LedgerWriter, describe: Describe, lock: AbstractContextManager[Any]) -> None:
        def encode_state() -> Callable[[], bytes]:
            values, groups = describe()
            return lambda: state_record(values, groups).to_bytes()

        self._describe = describe
        writer.keep_state(encode_state, lock)

    def _named_groups(self, describe: Describe) -> list[Callable[[], bytes]]:
        """Return the records of the groups that a coordinator that takes over needs."""
        _, groups = describe()
        known = (self._members.sync_index_of, self._identities)
        return [finished_record(group, self._members.sync_index, *known, kind=NAMED) for group in groups.values()]

    def changed(self) -> int:
        """Note that the state has changed. Returns: what `wait_written` takes."""
        return 0 if self._writer is None else self._writer.note_change()

    def wait_written(self, number: int) -> None:
        """Wait until a change outlives this process; without the lock. Raises: RunError if it cannot be written."""
        if self._writer is not None:
            self._writer.wait_written(number, timeout_s=_TIMEOUT_S)

    def leased(self, lease: Lease, producer_id: int, *, number: int | None) -> None:
        """Note that a prompt is leased; `number` in the draw order if it was drawn for it."""
        if lease.prompt.purpose == "train":
            fields = {"uid": lease.prompt.uid, "lease": lease.lease_id, "number": number}
            self._note(LEASED, **fields, producer=producer_id, sync=self._members.sync_index)

    def finished(self, group: RolloutGroup, *, sync_index: int) -> None:
        """Note a finished training group, whole."""
        if self._writer is None:
            return
        encode = finished_record(group, sync_index, self._members.sync_index_of, self._identities)
        self._not_durable[group.prompt.uid] = self._writer.append(encode, group_bytes=_num_bytes(as_packed(group)))

    def failed(self, closed: OpenLease, cause: str) -> None:
        """Note that a training prompt could not be rolled out."""
        fields = {"uid": closed.lease.prompt.uid, "num_samples": closed.lease.group_size, "cause": cause}
        self._note(FAILED, **fields, sync=closed.sync_index)

    def lost(self, producer_id: int) -> None:
        """Note that a producer's leases are void."""
        self._note("lost", producer=producer_id)

    def in_step(self, step: int, groups: Iterable[RolloutGroup]) -> int:
        """Note that groups are trained in a step, from 0. Returns: the record that has to be durable before."""
        uids = [group.prompt.uid for group in groups]
        self._note("in_step", step=step, uids=uids)
        awaited = max((self._not_durable.get(uid, 0) for uid in uids), default=0)
        durable = 0 if self._writer is None else self._writer.num_durable
        self._not_durable = {uid: number for uid, number in self._not_durable.items() if number > durable}
        return awaited

    def settled(self, step: int) -> None:
        """Note that an optimizer step, from 0, is taken."""
        self._note("settled", step=step)

    def version(self, version: int) -> None:
        """Note that all producers hold a policy version."""
        identity = self._identities.get(version)
        self._note("version", version=version, sync=self._members.sync_index, identity=identity)

    def checkpoint(self, position: Position, leases: LeaseTable) -> None:
        """Begin a segment with a checkpoint that is ordered."""
        if self._writer is not None:
            base = base_record(
                CHECKPOINT, position, sync_index=self._members.sync_index, open_leases=leases.open_ids("train")
            )
            groups = [] if self._describe is None else self._named_groups(self._describe)
            self._writer.begin([base.to_bytes, *groups], step=position.step)

    def saved(self, step: int) -> None:
        """Note that a checkpoint is complete: what was before it is deleted."""
        if self._writer is not None:
            self._note("saved", step=step)
            self._writer.drop_before(step)

    def wait_durable(self, number: int) -> None:
        """Wait until a record is on the disk; without the lock. Raises: RunError if it cannot be written."""
        if self._writer is not None and number > self._writer.num_durable:
            self._writer.wait_durable(number, timeout_s=_TIMEOUT_S)

    def room(self, groups: Iterable[PackedGroup]) -> AbstractContextManager[None]:
        """Wait while the disk is behind with groups, then take these in the block; entered without the lock."""
        if self._writer is None:
            return nullcontext()
        return self._writer.room(sum(map(_num_bytes, groups)), timeout_s=_TIMEOUT_S)

    def flush(self, *, timeout_s: float) -> None:
        """Wait until all records are on the disk; without the lock. Raises: RunError if they cannot be written."""
        if self._writer is not None:
            self._writer.flush(timeout_s=timeout_s)

    def _note(self, kind: str, **fields: Any) -> None:
        if self._writer is not None:
            self._writer.append(Record(kind=kind, fields=fields).to_bytes)


def _num_bytes(group: PackedGroup) -> int:
    """Return the bytes of a group's arrays, which are most of it, and at least 1."""
    return max(1, group.token_ids.nbytes + group.logprobs.nbytes)
