"""Which producers are in the run, which weights each holds, and when the next weight sync is due.

`policy_version` counts optimizer steps, `sync_index` counts completed syncs; staleness is counted in syncs.

A run that is resumed at step N begins with version N as if a sync had just brought it. Its producers load the model
that the run was started with and join with those weights, version 0: the trainers send them version N before their
first prompt, as they do for every producer that joins late. So no engine has to read a checkpoint, which may be gone
when a producer is replaced, and the weights come the same way as in the run that was never interrupted.
"""

from collections.abc import Iterable


class Membership:
    """Versions by producer. A sync is complete when every producer that is alive holds its version."""

    def __init__(self, *, start_version: int = 0) -> None:
        self._versions: dict[int, int] = {}
        self._sync_index_of = {start_version: 0}
        self.serving_version = start_version  # of the last completed sync
        self.sync_index = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """Producers that are alive."""
        return tuple(self._versions)

    def add(self, producer_id: int) -> None:
        """A producer with the weights of the model that the run was started with."""
        self._versions[producer_id] = 0

    def remove(self, producer_id: int) -> bool:
        """Forget a producer; False if it was not a member."""
        return self._versions.pop(producer_id, None) is not None

    def is_current(self, producer_id: int) -> bool:
        """True if the producer may roll out: it holds the weights of the last sync, or newer ones."""
        return self._versions.get(producer_id, -1) >= self.serving_version

    def stale(self, version: int) -> tuple[int, ...]:
        """Producers that hold older weights than `version`."""
        return tuple(producer for producer, held in self._versions.items() if held < version)

    def committed(self, producers: Iterable[int], version: int) -> None:
        """These producers serve `version` now."""
        # A producer that joins between two syncs gets the weights of that moment: as fresh as the last sync at least.
        self._sync_index_of.setdefault(version, self.sync_index)
        for producer in producers:
            if producer in self._versions:
                self._versions[producer] = version

    def is_sync_due(self, step: int, period: int, *, is_over: bool) -> bool:
        """True at multiples of `period` optimizer steps, and at the end if the last weights are not out yet.

        Multiples, counted from the run's first step: a run resumed between two syncs has its next one when it would
        have come anyway.
        """
        return step // period > self.serving_version // period or (is_over and step > self.serving_version)

    def complete_sync(self, version: int) -> None:
        """All producers hold `version`."""
        self.sync_index += 1
        self.serving_version = version
        self._sync_index_of[version] = self.sync_index

    def staleness(self, version: int) -> int:
        """Syncs completed since the sync that brought `version`."""
        return self.sync_index - self._sync_index_of[version]
