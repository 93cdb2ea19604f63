"""Record which producers are in the run, which weights each holds, and when the next weight sync is due.

`policy_version` counts optimizer steps, `sync_index` counts completed syncs; staleness is counted in syncs. A sync is
complete when every producer has staged the weights; each then commits them when it can, and gets no prompts before
unless they can wait for nothing but the commit.

A producer joins with the weights that it read from disk, version UNPROVEN: the trainers send it the current ones before
its first prompt, at the start of a run as in the middle. So every token is sampled with weights that came over the
wire, a replaced producer is no special case, and neither is a run that is resumed at step N, which
begins with version N as if a sync had just brought it.
"""

from collections.abc import Iterable, Mapping

from coati_rl.text import name_producers

UNPROVEN = -1  # version of weights that a producer read from disk


class Membership:
    """Keep the version of each producer; under the coordinator's lock."""

    def __init__(self, *, start_version: int = 0, sync_index_of: Mapping[int, int] | None = None) -> None:
        """`sync_index_of`: of versions before the start, 0 or negative."""
        self._versions: dict[int, int] = {}  # staged or serving
        self._committing: set[int] = set()
        self._lost: list[int] = []  # producers whose replacement has not joined yet, the oldest loss first
        self._sync_index_of = {**(sync_index_of or {}), start_version: 0}
        self.published_version = start_version  # of the last complete sync
        self.sync_index = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the producers that are alive."""
        return tuple(self._versions)

    @property
    def has_current(self) -> bool:
        """True while a producer holds the weights of the last sync, which the trainers may not have any more."""
        return any(version >= self.published_version for version in self._versions.values())

    @property
    def is_committing(self) -> bool:
        """True while a producer has yet to serve what it has staged."""
        return bool(self._committing)

    @property
    def missing(self) -> str | None:
        """Say which producer is waited for; None if all that were there are, or have been replaced."""
        if self._lost:
            return f"waiting for a replacement of {name_producers(self._lost)}"
        return None if self._versions else "waiting for the first producer: its engine is loading"

    @property
    def committing(self) -> str:
        """Name the producers that have yet to serve what they have staged, and the version, for messages."""
        version = max((self._versions[producer] for producer in self._committing), default=UNPROVEN)
        return f"{name_producers(sorted(self._committing))} to commit version {version}"

    def add(self, producer_id: int, version: int) -> None:
        """Let a producer join with these weights; it takes the place of the one that was lost first."""
        del self._lost[:1]
        self._versions[producer_id] = version

    def remove(self, producer_id: int) -> bool:
        """Forget a producer; False if it was not a member."""
        self._committing.discard(producer_id)
        if self._versions.pop(producer_id, None) is None:
            return False
        self._lost.append(producer_id)
        return True

    def is_current(self, producer_id: int, *, is_drained: bool = False) -> bool:
        """True if the producer may have prompts: it serves the weights of the last sync, or newer ones.

        Args:
            is_drained: nothing is generating there, so that having staged them is as good.
        """
        is_serving = is_drained or producer_id not in self._committing
        return is_serving and self.version(producer_id) >= self.published_version

    def version(self, producer_id: int) -> int:
        """Return what the producer has staged or serves; UNPROVEN if it is not a member."""
        return self._versions.get(producer_id, UNPROVEN)

    def stale(self, version: int) -> tuple[int, ...]:
        """Return the producers that hold older weights than `version`."""
        return tuple(producer for producer, held in self._versions.items() if held < version)

    def staged(self, producers: Iterable[int], version: int) -> None:
        """Note that these producers hold `version` beside what they serve."""
        # A producer that joins between two syncs gets the weights of that moment: as fresh as the last sync at least.
        self._sync_index_of.setdefault(version, self.sync_index)
        for producer in producers:
            if producer in self._versions:
                self._versions[producer] = version
                self._committing.add(producer)

    def committed(self, producer_id: int) -> None:
        """Note that the producer serves what it had staged."""
        self._committing.discard(producer_id)

    def is_sync_due(self, step: int, period: int, *, is_over: bool) -> bool:
        """True at multiples of `period` optimizer steps, and at the end if the last weights are not out yet.

        Multiples, counted from the run's first step: a run resumed between two syncs has its next one when it would
        have come anyway.
        """
        return step // period > self.published_version // period or (is_over and step > self.published_version)

    def complete_sync(self, version: int) -> None:
        """Note that all producers hold `version`."""
        self.sync_index += 1
        self.published_version = version
        self._sync_index_of[version] = self.sync_index

    def staleness(self, version: int) -> int:
        """Return how many syncs were completed since the one that brought `version`."""
        return self.sync_index - self._sync_index_of[version]
