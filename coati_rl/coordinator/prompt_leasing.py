"""Lease prompts to producers and receive their groups: the producers' side of the coordinator.

Consumes: finished groups. Produces: leases, or the reason why there is none. Nothing here waits; the coordinator does.
"""

from collections.abc import Collection, Sequence

from coati_rl.batching.packed_group import PackedGroup
from coati_rl.coordinator.leases import OpenLease
from coati_rl.coordinator.run_state import RunState
from coati_rl.errors import ConfigError, RunError
from coati_rl.types import Lease, Prompt
from coati_rl.work import LeaseReply


class PromptLeasing:
    """Handle the calls of producers; called under the coordinator's lock."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def add(self, producer_id: int, version: int, *, is_extra: bool = False) -> None:
        """Add a producer with this policy version; it gets prompts once its weights are current.

        With `is_extra` it is beside those of the plan: it replaces none, and none replaces it.
        """
        if producer_id in self._state.members.ids:
            # The driver adds it again, as it has lost the answer.
            self._state.absent.discard(producer_id)  # it has had no prompts yet
            self._state.notify()
            return
        self._state.members.add(producer_id, version, is_extra=is_extra)
        self._state.leases.producer_idle.join(producer_id)
        self._state.event("producer_joined", producer=producer_id)

    def remove(self, producer_id: int, cause: str, *, leaves: bool = False) -> None:
        """Remove a producer; its prompts are issued again. With `leaves` no other one is to replace it."""
        self._state.absent.discard(producer_id)
        if self._state.members.remove(producer_id, is_replaced=not leaves):
            lost = self._state.leases.revoke(producer_id)
            self._state.ledger.lost(producer_id)
            kind = "producer_left" if leaves else "producer_lost"
            self._state.event(kind, producer=producer_id, cause=cause, prompts_reissued=lost)
            self._state.record_sync()

    def rejoin(self, producer_id: int, held: Collection[int]) -> tuple[int, ...]:
        """Take a producer's word for the leases that it holds, after a takeover: all others are issued again.

        Returns: those that are void, as they were issued after what the ledger had.
        """
        void = self._state.leases.give_back(producer_id, but=held)
        self._state.absent.discard(producer_id)
        self._state.progressed()
        return void

    def refusal(self, producer_id: int, *, is_drained: bool) -> str | None:
        """Return why a producer gets no prompt; None if it does.

        Args:
            producer_id: the requesting producer.
            is_drained: True if it generates nothing.
        """
        state, members = self._state, self._state.members
        if state.is_finished:
            return "the run is over"
        if producer_id in state.absent:
            return "it has not said yet what it holds, since another coordinator has taken over"
        held, published = members.version(producer_id), members.published_version
        if held < published:
            return f"it has not received version {published} yet"
        if not members.is_current(producer_id, is_drained=is_drained):
            return f"it has to commit version {held} first"
        if state.turns.is_of_trainers:
            return "the trainers have the devices"
        if state.problem:
            # Trainers may be busy for long: no more prompts are to be lost until they receive the problem.
            return "the run is about to end"
        if state.leases.has_lost or state.evaluation.has_pending:
            return None
        return state.flow.refusal()

    def lease(self, producer_id: int, *, max_prompts: int, is_drained: bool) -> LeaseReply:
        """Lease up to `max_prompts` prompts."""
        state, leases = self._state, list[Lease]()
        while len(leases) < max_prompts and self.refusal(producer_id, is_drained=is_drained) is None:
            num_drawn = state.queue.num_drawn
            lease = state.leases.issue(producer_id, self._draw, sync_index=state.members.sync_index)
            if lease is None:
                break
            leases.append(lease)
            is_drawn = state.queue.num_drawn > num_drawn
            state.ledger.leased(lease, producer_id, number=num_drawn if is_drawn else None)
        if leases:
            state.changed.notify_all()  # a resumed run trains once its slots are leased
        return LeaseReply(
            leases=tuple(leases),
            policy_version=state.members.version(producer_id),
            is_finished=state.is_finished,
            reason="" if leases else self.refusal(producer_id, is_drained=is_drained) or "",
            overdue=() if (at := state.flow.overdue_sync) is None else state.leases.held_since(producer_id, at),
        )

    def put(self, producer_id: int, groups: Sequence[PackedGroup]) -> int:
        """Receive finished groups. Returns: the number accepted (those under a void lease are not)."""
        state, num_accepted, has_freed_slot = self._state, 0, False
        for packed in groups:
            if (closed := state.leases.close(packed.lease_id, producer_id)) is None:
                continue
            try:
                group = packed.unpack(closed.lease.prompt, temperature=closed.lease.sampling.temperature)
            except ValueError as error:
                self._give_up(closed, f"the group of producer {producer_id} is inconsistent: {error}")
                continue
            num_accepted += 1
            if group.prompt.purpose == "eval":
                state.evaluation.add(group)
            else:
                state.ledger.finished(group, sync_index=closed.sync_index)
                if state.stats.counts.add(group):
                    state.flow.add(group, sync_index=closed.sync_index)
                else:
                    has_freed_slot = True
        self._write_evaluation_if_done()
        state.progressed(producers=None if has_freed_slot else ())
        return num_accepted

    def fail(self, producer_id: int, lease_id: int, cause: str) -> None:
        """Drop a prompt that could not be rolled out: it is recorded and counted, and its slot is freed."""
        if (closed := self._state.leases.close(lease_id, producer_id)) is not None:
            self._give_up(closed, cause)

    def _give_up(self, closed: OpenLease, cause: str) -> None:
        """Record and count a prompt without a group, after its lease was closed."""
        state, lease = self._state, closed.lease
        state.event("rollout_failed", uid=lease.prompt.uid, cause=cause)
        if lease.prompt.purpose == "eval":
            state.evaluation.add_failure(lease.prompt)
            self._write_evaluation_if_done()
        else:
            state.ledger.failed(closed, cause)
            state.stats.counts.add_failed(lease.group_size, cause)

    def _draw(self) -> Prompt | None:
        """Return the next prompt; None after the last one, or if it cannot be read or made, which ends the run."""
        try:
            return self._state.evaluation.draw() or self._state.flow.draw()
        except (RunError, ConfigError) as error:
            self._state.fail(str(error))
            return None

    def _write_evaluation_if_done(self) -> None:
        if self._state.evaluation.take_if_done():
            self._state.writer.submit(self._write_evaluation)

    def _write_evaluation(self) -> None:
        """Write the files of a round, then end it; in the writer's thread."""
        summaries = self._state.evaluation.write()
        best = self._state.evaluation.name_best()  # before the round ends: the next checkpoint deletes others
        with self._state.changed:
            self._state.evaluation.close()
            for summary in summaries:
                self._state.event("evaluation", **summary)
            if best is not None:
                self._state.event("best", **best)
