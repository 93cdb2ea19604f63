"""Keep environments running for leased prompts, up to a number of samples at a time.

In: leases. Out: the trajectories of their groups, in the order in which they are done. One thread uses it, and runs the
event loop of the environments whenever it waits; `wake` may be called from any. G is the group size, the greedy episode
of a lease with a baseline included.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from coati_rl.errors import RolloutError, RunError
from coati_rl.observability.timeline import Timeline
from coati_rl.protocols import GenerationEngine
from coati_rl.types import Lease, Score, Trajectory
from producer.environments.environment import Environment, Rollout
from producer.event_loop import QueueEventLoop
from producer.generation import LeaseGenerate

_CLOSE_S = 5.0  # for environments that were cancelled to end


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledOut:
    """Hold the trajectories of a lease's group, its greedy episode's last, or why there are none."""

    lease: Lease
    trajectories: tuple[Trajectory, ...] = ()
    scores: Mapping[int, Score] = field(default_factory=dict)  # by episode: those that need no scorer
    records: Mapping[int, dict[str, Any]] = field(default_factory=dict)  # by episode
    error: str | None = None


class GroupRunner:
    """Run the environment once per lease; a group that is done makes room for the next at once."""

    def __init__(
        self,
        engine: GenerationEngine,
        environment: Environment,
        *,
        max_sequences: int,
        group_size: int,
        by_sample: bool = False,
        timeline: Timeline,
    ) -> None:
        """Begin with nothing in flight.

        Args:
            engine: that environments ask for samples.
            environment: of all prompts.
            max_sequences: samples in flight, so that max_sequences / G training prompts are.
            group_size: G. A prompt of fewer samples takes the place of one of G: an evaluation leaves the order in
                which training prompts are sampled, and the batches, as they are without it, and so the weights.
            by_sample: count the samples that the engine has not ended in place of prompts, so that a prompt begins as
                soon as a place is free; up to G - 1 of its samples then wait in the engine.
            timeline: of the producer.
        """
        self._by_sample = by_sample
        self._engine = engine
        self._environment = environment
        self._max_sequences = max_sequences
        self._group_size = group_size
        self._timeline = timeline
        self._loop = QueueEventLoop()
        self._num_drops = 0
        self._changed = asyncio.Event()  # a group is done, or a wake-up
        self._running: dict[asyncio.Task[RolledOut], Lease] = {}
        self._cuts: dict[int, asyncio.Event] = {}  # of running groups, by lease id
        self._dropped: set[asyncio.Task[RolledOut]] = set()  # of the running ones, done or not
        self._done: deque[asyncio.Task[RolledOut]] = deque()

    @property
    def is_drained(self) -> bool:
        """True if no environment is running, so that nothing is generating or will ask for more."""
        return not self._running

    def room(self) -> int:
        """Count the prompts, of G samples each, that may be submitted now."""
        if self._by_sample:
            return -(min(0, self._engine.num_sequences() - self._max_sequences) // self._group_size)
        num_sequences = sum(max(_num_episodes(lease), self._group_size) for lease in self._running.values())
        return max(0, self._max_sequences - num_sequences) // self._group_size

    def submit(self, leases: Sequence[Lease], *, min_policy_version: int) -> None:
        """Begin the groups of leases; their first requests are with the engine, in order, when this returns."""
        for lease in leases:
            task = self._loop.create_task(self._roll_out(lease, min_policy_version))
            self._running[task] = lease
            task.add_done_callback(self._note)
        self._loop.run_until_complete(asyncio.sleep(0))

    def take_finished(self, timeout_s: float) -> list[RolledOut]:
        """Wait for the first group that is done, or a wake-up, and return all that are.

        Raises: EngineError when the engine has ended, after what was done before.
        """
        self._loop.run_until_complete(self._wait(timeout_s))
        finished: list[RolledOut] = []
        while self._done:
            if self._done[0] in self._dropped or self._done[0].cancelled():
                self._forget(self._done.popleft())
                continue
            try:
                result = self._done[0].result()
            except RunError:
                if finished:
                    return finished  # it is raised the next time
                raise
            finished.append(result)
            del self._running[self._done.popleft()]
        if not finished:
            self._engine.check_alive()  # with nothing in flight, nobody else would tell
        return finished

    @property
    def lease_ids(self) -> list[int]:
        """Return the leases whose groups are not done, or not taken yet; not those that were dropped."""
        return [lease.lease_id for task, lease in self._running.items() if task not in self._dropped]

    def drop(self, lease_ids: Collection[int]) -> None:
        """End the groups of these leases, and what the engine generates for them; they are not handed out."""
        self._num_drops += bool(lease_ids)
        for task, lease in self._running.items():
            if lease.lease_id in lease_ids:
                task.cancel()  # does nothing to one that is done
                self._dropped.add(task)

    def cut(self, lease_ids: Collection[int]) -> None:
        """Have the open episodes of these leases end."""
        for lease_id in lease_ids:
            if lease_id in self._cuts:
                self._cuts[lease_id].set()

    def wake(self, _: object = None) -> None:
        """End a wait in `take_finished`; a callback for futures of what else the caller waits for."""
        self._loop.call_from_anywhere(self._changed.set)

    def close(self) -> None:
        """End all environments, and what the engine generates for them; nobody waits for it any more."""
        for task in self._running:
            task.cancel()
        if self._running:
            ended, _ = self._loop.run_until_complete(asyncio.wait(self._running, timeout=_CLOSE_S))
            for task in ended:
                _ = task.cancelled() or task.exception()  # else asyncio logs that nobody has looked at it
        self._loop.close()

    def _call_soon(self, answer: Callable[[], object]) -> None:
        """Pass an answer of the engine on; one of a single sample may have made room."""
        self._loop.call_from_anywhere(answer)
        if self._by_sample:
            self.wake()

    async def _wait(self, timeout_s: float) -> None:
        if not self._done:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()

    def _note(self, task: "asyncio.Task[RolledOut]") -> None:
        self._done.append(task)
        self._changed.set()

    def _forget(self, task: "asyncio.Task[RolledOut]") -> None:
        """Remove a group that is done, and not handed out."""
        _ = task.cancelled() or task.exception()  # else asyncio logs that nobody has looked at it
        self._dropped.discard(task)
        del self._running[task]

    async def _roll_out(self, lease: Lease, min_policy_version: int) -> RolledOut:
        generate = LeaseGenerate(
            lease,
            self._engine,
            call_soon=self._call_soon,
            min_policy_version=min_policy_version,
            timeline=self._timeline,
            again=self._num_drops,
        )
        self._cuts[lease.lease_id] = generate.cut
        try:
            rollout = await self._environment.run(lease.prompt, generate, group_size=_num_episodes(lease))
            return _rolled_out(lease, rollout)
        except RunError:  # the engine has ended, say
            raise
        except RolloutError as error:
            return RolledOut(lease=lease, error=str(error))
        except Exception as error:  # noqa: BLE001 - a failed rollout is data: recorded and counted
            return RolledOut(lease=lease, error=f"the environment failed: {type(error).__name__}: {error}")
        finally:
            if self._cuts.get(lease.lease_id) is generate.cut:  # else it was dropped, and its lease is issued again
                del self._cuts[lease.lease_id]
            generate.close()


def _num_episodes(lease: Lease) -> int:
    """Return the episodes of a lease: its group, and the greedy one after it, if it has a baseline."""
    return lease.group_size + lease.has_baseline


def _rolled_out(lease: Lease, rollout: Rollout) -> RolledOut:
    """Raises: RolloutError if it is not of the lease's episodes, by episode."""
    episodes, wanted = [each.episode for each in rollout.trajectories], range(_num_episodes(lease))
    if sorted(set(episodes)) != list(wanted) or episodes != sorted(episodes):
        raise RolloutError(f"the environment gave trajectories of the episodes {episodes}, {len(wanted)} are wanted")
    if unknown := sorted({*rollout.scores, *rollout.records} - set(wanted)):
        raise RolloutError(f"the environment gave scores or records of the episodes {unknown}, {len(wanted)} are there")
    return RolledOut(
        lease=lease, trajectories=tuple(rollout.trajectories), scores=rollout.scores, records=rollout.records
    )
