"""Lease the prompts of a dataset to one rollout loop, and hand over what becomes of them in the order of the prompts.

Consumes: finished groups, in any order. Waits for: nothing; it answers at once. Produces: leases, and for each prompt
in turn its group, or why there is none. Groups that are finished before an earlier one are held, so only a bounded
number of prompts is leased beyond the first unfinished one.
"""

from collections.abc import Callable, Sequence

from coati_rl.batching.packed_group import PackedGroup
from coati_rl.coordinator.leases import LeaseTable
from coati_rl.types import Lease, Prompt, RolloutGroup
from coati_rl.work import LeaseReply

_MAX_HELD = 4  # times the prompts that are asked for at first


class BatchCoordinator:
    """Implement `ProducerCoordinator` for the loop's thread, without weight syncs."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        leases: LeaseTable,
        write: Callable[[Prompt, RolloutGroup | str], None],
        *,
        max_in_flight: int,
    ) -> None:
        """Begin with the first prompt.

        Args:
            prompts: with distinct uids.
            leases: table without open leases.
            write: called for each prompt in order, with its group or the cause of its failure.
            max_in_flight: prompts that are sampled at a time.
        """
        self._prompts = prompts
        self._leases = leases
        self._write = write
        self._max_ahead = _MAX_HELD * max_in_flight
        self._index_of = {prompt.uid: index for index, prompt in enumerate(prompts)}
        self._num_leased = 0
        self._num_written = 0
        self._held: dict[int, RolloutGroup | str] = {}  # by the prompt's index

    def lease(self, producer_id: int, *, max_prompts: int, timeout_s: float, is_drained: bool = False) -> LeaseReply:
        """See `ProducerCoordinator`; never waits, as no other producer gives prompts back."""
        leases: list[Lease] = []
        while len(leases) < max_prompts and (lease := self._leases.issue(producer_id, self._draw)) is not None:
            leases.append(lease)
        is_finished = self._num_written == len(self._prompts)
        return LeaseReply(leases=tuple(leases), policy_version=0, is_finished=is_finished)

    def put(self, producer_id: int, groups: Sequence[PackedGroup]) -> int:
        """See `ProducerCoordinator`. Raises: what `write` raises."""
        for packed in groups:
            if (closed := self._leases.close(packed.lease_id, producer_id)) is not None:
                group = packed.unpack(closed.lease.prompt, temperature=closed.lease.sampling.temperature)
                self._finish(closed.lease.prompt, group)
        return len(groups)

    def fail(self, producer_id: int, lease_id: int, cause: str) -> None:
        """See `ProducerCoordinator`. Raises: what `write` raises."""
        if (closed := self._leases.close(lease_id, producer_id)) is not None:
            self._finish(closed.lease.prompt, cause)

    def rejoin(self, producer_id: int, held: Sequence[int]) -> tuple[int, ...]:
        """See `ProducerCoordinator`; this one is in the producer's process, and is not replaced."""
        return self._leases.give_back(producer_id, but=held)

    def _draw(self) -> Prompt | None:
        is_allowed = self._num_leased < min(len(self._prompts), self._num_written + self._max_ahead)
        if not is_allowed:
            return None
        self._num_leased += 1
        return self._prompts[self._num_leased - 1]

    def _finish(self, prompt: Prompt, outcome: RolloutGroup | str) -> None:
        self._held[self._index_of[prompt.uid]] = outcome
        while (next_one := self._held.pop(self._num_written, None)) is not None:
            self._write(self._prompts[self._num_written], next_one)
            self._num_written += 1
