"""Record the producers of the run, the policy version of each, and when the next weight sync is due.

`policy_version` counts optimizer steps, `sync_index` counts completed syncs; staleness is counted in syncs. A sync is
complete when every producer has staged the weights; each then commits them when it can. Before that it gets prompts
only if it is drained, as they then wait for the commit alone.

A producer joins with the weights that it read from disk, version UNSYNCED: the trainers send it the current ones before
its first prompt, at the start of a run and later. So every token is sampled with weights sent by the trainers. A
replaced producer is handled in the same way, and so is a run resumed at step N, which begins with version N as if a
sync had just sent it.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar

from coati_rl.text import name_producers

UNSYNCED = -1  # policy version of weights that a producer read from disk
_SYNCS_BEYOND = 100  # syncs that are remembered beyond those whose rollouts may be trained


class Membership:
    """Keep the policy version of each producer; called under the coordinator's lock."""

    KEPT: ClassVar = (
        "_versions",
        "_committing",
        "_unproved",
        "_lost",
        "_extra",
        "_sync_index_of",
        "published_version",
        "sync_index",
    )

    def __init__(
        self, *, start_version: int = 0, sync_index_of: Mapping[int, int] | None = None, max_staleness: int = 0
    ) -> None:
        """Begin at a policy version.

        Args:
            start_version: of the weights.
            sync_index_of: the syncs of earlier versions, 0 or negative.
            max_staleness: syncs after which no rollout of a version is trained any more.
        """
        self._num_kept_syncs = max_staleness + _SYNCS_BEYOND
        self._versions: dict[int, int] = {}  # staged or serving
        self._committing: set[int] = set()
        # Joined after others: a first lease comes after the probe of what they serve, and not while they commit.
        self._unproved: set[int] = set()
        self._lost: list[int] = []  # producers whose replacement has not joined yet, the oldest loss first
        self._extra: set[int] = set()  # beside those of the plan: nobody waits for another one in their place
        self._sync_index_of = {**(sync_index_of or {}), start_version: 0}
        self.published_version = start_version  # of the last complete sync
        self.sync_index = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the ids of the live producers."""
        return tuple(self._versions)

    @property
    def has_current(self) -> bool:
        """Return True while a producer holds the weights of the last sync, which trainers may no longer have."""
        return any(version >= self.published_version for version in self._versions.values())

    @property
    def is_first_awaited(self) -> bool:
        """Return True until the first producer has joined."""
        return not self._versions and not self._lost

    @property
    def _has_begun(self) -> bool:
        return self.sync_index > 0 or any(version != UNSYNCED for version in self._versions.values())

    @property
    def is_committing(self) -> bool:
        """Return True while a producer has staged weights that it does not serve yet."""
        return bool(self._committing)

    @property
    def missing(self) -> str | None:
        """Return which producers the run waits for; None if all are alive, or have been replaced."""
        if self._lost:
            return f"waiting for a replacement of {name_producers(self._lost)}"
        return None if self._versions else "waiting for the first producer: its engine is loading"

    @property
    def committing(self) -> str:
        """Return the names of the producers that have not committed yet, and the policy version, for messages."""
        version = max((self._versions[producer] for producer in self._committing), default=UNSYNCED)
        return f"{name_producers(sorted(self._committing))} to commit version {version}"

    def add(self, producer_id: int, version: int, *, is_extra: bool = False) -> None:
        """Add a producer with this policy version; unless it `is_extra` it replaces the one that was lost first."""
        if is_extra:
            self._extra.add(producer_id)
        else:
            del self._lost[:1]
        self._versions[producer_id] = version
        if version == UNSYNCED and self._has_begun:
            self._unproved.add(producer_id)

    def remove(self, producer_id: int, *, is_replaced: bool = True) -> bool:
        """Remove a producer, which another one replaces or not; return False if it was not a member."""
        self._committing.discard(producer_id)
        if self._versions.pop(producer_id, None) is None:
            return False
        self._unproved.discard(producer_id)
        if is_replaced and producer_id not in self._extra:
            self._lost.append(producer_id)
        return True

    def is_current(self, producer_id: int, *, is_drained: bool = False) -> bool:
        """Return True if the producer may get prompts: it serves the weights of the last sync, or newer ones.

        Args:
            is_drained: True if it generates nothing, so that staged weights suffice.
        """
        is_proved = producer_id not in self._unproved
        is_serving = (is_drained and is_proved) or producer_id not in self._committing
        return is_serving and self.version(producer_id) >= self.published_version

    def version(self, producer_id: int) -> int:
        """Return the policy version that the producer has staged or serves; UNSYNCED if it is not a member."""
        return self._versions.get(producer_id, UNSYNCED)

    def stale(self, version: int) -> tuple[int, ...]:
        """Return the producers that hold an older policy version than `version`."""
        return tuple(producer for producer, held in self._versions.items() if held < version)

    def staged(self, producers: Iterable[int], version: int) -> None:
        """Record that these producers have staged `version`."""
        # A producer that joins between two syncs gets the current weights: at least as new as the last sync's.
        self._sync_index_of.setdefault(version, self.sync_index)
        for producer in producers:
            if producer in self._versions:
                self._versions[producer] = version
                self._committing.add(producer)

    def committed(self, producer_id: int) -> None:
        """Record that the producer serves the weights that it had staged, and that these are the trainers'."""
        self._committing.discard(producer_id)
        self._unproved.discard(producer_id)

    def is_sync_due(self, step: int, period: int, *, is_over: bool) -> bool:
        """Return True at multiples of `period` optimizer steps, and at the end if the last weights were not sent.

        Steps are counted from the run's first one: a run resumed between two syncs has its next one at the same step.
        """
        return step // period > self.published_version // period or (is_over and step > self.published_version)

    def complete_sync(self, version: int) -> None:
        """Record that all producers hold `version`."""
        self.sync_index += 1
        self.published_version = version
        self._sync_index_of[version] = self.sync_index
        first = self.sync_index - self._num_kept_syncs
        for old in [each for each, index in self._sync_index_of.items() if index < first]:
            del self._sync_index_of[old]

    @property
    def sync_index_of(self) -> Mapping[int, int]:
        """Return the sync that sent each policy version, of those that rollouts may still have."""
        return self._sync_index_of

    def staleness(self, version: int) -> int:
        """Return the number of syncs completed since the one that sent `version`."""
        return self.sync_index - self._sync_index_of[version]
