"""Take up from the ledger what was rolled out since a checkpoint, by weights that the resumed run has.

A group is taken if no token of it is of a later policy version than the checkpoint's, and its lease is not older than
the bound on staleness allows. Groups that steps after the checkpoint trained are among them: the resumed run trains
them again, from the same tokens. All other prompts are sampled again.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coati_rl.batching.packed_group import as_packed
from coati_rl.checkpoint.ledger_files import CHECKPOINT, START, read_ledger
from coati_rl.checkpoint.ledger_frames import LedgerError, Record, to_json
from coati_rl.checkpoint.ledger_groups import group_from_bytes, group_to_bytes
from coati_rl.checkpoint.position import Position
from coati_rl.checkpoint.untrained_rollouts import FinishedGroup
from coati_rl.types import Prompt, RolloutGroup

LEASED, FINISHED, FAILED = "leased", "finished", "failed"
# Of a coordinator that takes over, and not of a resumption: its beginning, a state, a group that a state names.
TAKEN_OVER, STATE, NAMED = "taken over", "state", "named"
_CHANGED = "changed"  # of START


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedPrompt:
    """Hold a prompt that could not be rolled out."""

    uid: str
    num_samples: int
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveredRollouts:
    """Hold what a resumed run takes up; syncs are counted as in `UntrainedRollouts`: the checkpoint's is 0."""

    num_drawn: int  # prompts drawn from the source up to the last one that is taken up
    waiting: tuple[str, ...]  # uids of those before that are to be sampled
    finished: tuple[FinishedGroup, ...] = ()  # in the order in which they came in; their lease ids are in `lease_ids`
    failed: tuple[FailedPrompt, ...] = ()
    lease_ids: Mapping[str, int] = field(default_factory=dict)  # of prompts that were leased: 0, 1, ... in that order
    numbers: Mapping[str, int] = field(default_factory=dict)  # in the draw order, of prompts drawn since
    sync_index_of: Mapping[int, int] = field(default_factory=dict)  # policy version -> the sync that sent it
    identities: Mapping[int, str] = field(default_factory=dict)  # policy version -> its weights'

    def line(self) -> str:
        """Return one line for the log."""
        return f"takes up {len(self.finished)} finished rollouts of the ledger, which are not sampled again"


def recover(
    directory: Path, position: Position, prompt_of: Callable[[str], Prompt], *, n_behind: int
) -> RecoveredRollouts | None:
    """Return what the ledger holds of a checkpoint's resumption; None if it has nothing of that checkpoint.

    Args:
        directory: of the ledger; may not exist.
        position: the checkpoint's.
        prompt_of: finds a prompt by its uid.
        n_behind: the bound on staleness, in weight syncs.
    Raises: LedgerError if the ledger is damaged, or not that of the checkpoint.
    """
    since = _read_since(directory, position, n_behind)
    if since is None:
        return None
    try:
        return since.recovered(prompt_of)
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{directory}: a group cannot be read: {error!r}") from error


def start_records(
    position: Position, recovered: RecoveredRollouts | None, *, has_changed: bool = False
) -> list[Callable[[], bytes]]:
    """Return what encodes the first segment of a run: where it begins, and what it has taken up.

    With `has_changed` its rollouts are of other settings than the checkpoint's, with which nobody takes them up.
    """
    found = recovered or RecoveredRollouts(num_drawn=position.num_drawn, waiting=position.waiting)
    base = base_record(START, position, sync_index=0, open_leases={})
    records = [replace(base, fields={**base.fields, _CHANGED: has_changed})]
    records += [
        Record(kind=LEASED, fields={"uid": uid, "lease": lease_id, "number": found.numbers.get(uid), "sync": 0})
        for uid, lease_id in found.lease_ids.items()
    ]
    records += [
        Record(kind=FAILED, fields={"uid": each.uid, "sync": 0, "num_samples": each.num_samples, "cause": each.cause})
        for each in found.failed
    ]
    return [
        *(each.to_bytes for each in records),
        *(
            finished_record(each.group, each.sync_index, found.sync_index_of, found.identities)
            for each in found.finished
        ),
    ]


def base_record(kind: str, position: Position, *, sync_index: int, open_leases: Mapping[str, int]) -> Record:
    """Return the record that a segment begins with.

    Args:
        kind: START or CHECKPOINT.
        position: of the checkpoint.
        sync_index: of the last sync, as later records count them.
        open_leases: uid of a prompt that is being sampled -> its lease.
    """
    fields = {
        "step": position.step,
        "num_drawn": position.num_drawn,
        "waiting": list(position.waiting),
        "kept": list(position.kept),
        "sync": sync_index,
        "open": dict(open_leases),
    }
    return Record(kind=kind, fields=fields)


def state_record(values: Any, groups: Collection[str]) -> Record:
    """Return the record of the coordinator's state, JSON, with the uids of the groups that it names."""
    body = to_json(values).encode()
    return Record(kind=STATE, fields={"groups": [*groups]}, body=body)


def finished_record(
    group: RolloutGroup,
    sync_index: int,
    sync_index_of: Mapping[int, int],
    identities: Mapping[int, str],
    *,
    kind: str = FINISHED,
) -> Callable[[], bytes]:
    """Return what encodes the record of a finished group, leased after a sync."""
    versions = sorted({version for version, _ in as_packed(group).policy_versions})
    fields = {
        "uid": group.prompt.uid,
        "lease": group.lease_id,
        "sync": sync_index,
        "versions": [[each, sync_index_of.get(each), identities.get(each)] for each in versions],
    }
    return lambda: Record(kind=kind, fields=fields, body=group_to_bytes(group)).to_bytes()


class _Since:
    """Collect the records since a checkpoint."""

    def __init__(self, base: Mapping[str, Any], position: Position, n_behind: int) -> None:
        self._position = position
        self._n_behind = n_behind
        self._sync: int = base["sync"]
        self._leases: dict[str, int] = dict(base["open"])
        self._numbers: dict[str, int] = {}
        self._finished: dict[str, Record] = {}
        self._failed: dict[str, FailedPrompt] = {}

    def add(self, record: Record) -> None:
        """Take a record, if a resumption uses it."""
        fields = record.fields
        if record.kind == LEASED:
            self._leases[fields["uid"]] = fields["lease"]
            if fields["number"] is not None:
                self._numbers[fields["uid"]] = fields["number"]
        elif record.kind == FINISHED and self._is_usable(fields):
            self._finished.setdefault(fields["uid"], record)
        elif record.kind == FAILED and fields["sync"] <= self._sync:
            uid = fields["uid"]
            self._failed[uid] = FailedPrompt(uid=uid, num_samples=fields["num_samples"], cause=fields["cause"])

    def recovered(self, prompt_of: Callable[[str], Prompt]) -> RecoveredRollouts:
        """Return what is taken up."""
        position, taken = self._position, self._finished.keys() | self._failed.keys()
        if lost := taken - {*position.waiting} - self._numbers.keys():
            raise LedgerError(f"{min(lost)} was not drawn")
        num_drawn = max((self._numbers[uid] + 1 for uid in taken & self._numbers.keys()), default=position.num_drawn)
        drawn = {uid: number for uid, number in self._numbers.items() if number < num_drawn}
        if {*drawn.values()} != {*range(position.num_drawn, num_drawn)}:
            raise LedgerError(f"not all prompts from {position.num_drawn} to {num_drawn} are in it")
        waiting = tuple(uid for uid in (*position.waiting, *drawn) if uid not in taken)
        ordered = sorted((lease, uid) for uid, lease in self._leases.items() if uid in taken or uid in waiting)
        lease_ids = {uid: place for place, (_, uid) in enumerate(ordered)}
        records = self._finished.values()
        versions = [each for record in records for each in record.fields["versions"]]
        return RecoveredRollouts(
            num_drawn=num_drawn,
            waiting=waiting,
            finished=tuple(self._group(record, lease_ids, prompt_of) for record in records),
            failed=tuple(self._failed.values()),
            lease_ids=lease_ids,
            numbers=drawn,
            sync_index_of={version: sync - self._sync for version, sync, _ in versions if sync is not None},
            identities={version: identity for version, _, identity in versions if identity is not None},
        )

    def _group(self, record: Record, lease_ids: Mapping[str, int], prompt_of: Callable[[str], Prompt]) -> FinishedGroup:
        group = group_from_bytes(record.body, lease_id=lease_ids[record.fields["uid"]], prompt_of=prompt_of)
        return FinishedGroup(group=group, sync_index=record.fields["sync"] - self._sync)

    def _is_usable(self, fields: Mapping[str, Any]) -> bool:
        is_of_known_weights = all(version <= self._position.step for version, _, _ in fields["versions"])
        return is_of_known_weights and -self._n_behind <= fields["sync"] - self._sync <= 0


def _read_since(directory: Path, position: Position, n_behind: int) -> _Since | None:
    """Read all records that follow the last one of the checkpoint; None without one."""
    since: _Since | None = None
    for record in read_ledger(directory):
        if record.kind not in (START, CHECKPOINT):
            if since is not None:
                since.add(record)
        elif record.fields["step"] == position.step and not record.fields.get(_CHANGED):
            _check_base(directory, record, position)
            since = _Since(record.fields, position, n_behind)
    return since


def _check_base(directory: Path, record: Record, position: Position) -> None:
    there = (record.fields["num_drawn"], tuple(record.fields["waiting"]), tuple(record.fields["kept"]))
    if there != (position.num_drawn, position.waiting, position.kept):
        raise LedgerError(f"{directory} is not of this checkpoint: its prompts at step {position.step} are others")
