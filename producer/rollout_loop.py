"""Generate and score rollouts for leased prompts.

Consumes: leases. Waits for: environments and their engine, the reward workers, prompts. Is unblocked by: finished
groups, finished scores, a new lease. Produces: scored rollout groups.

Each prompt is run by the environment, then scored; at most `max_sequences` samples are generated at a time, and a
finished prompt makes room for the next at once: there is no barrier between prompts. With partial rollouts a finished
sample does.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from coati_rl.batching.episodes import final_trajectories
from coati_rl.batching.packed_group import PackedGroup
from coati_rl.errors import CoordinatorReplacedError
from coati_rl.observability.phases import PHASES
from coati_rl.observability.timeline import NO_TIMELINE, Span, Timeline
from coati_rl.protocols import GenerationEngine, GroupScorer, ProducerCoordinator
from coati_rl.types import Baseline, Lease, RolloutGroup, Score, Trajectory
from producer.environments.environment import Environment
from producer.environments.episode_scores import with_environment_rewards
from producer.environments.single_turn import SampleBySample, SingleTurn
from producer.group_runner import GroupRunner, RolledOut

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0  # for prompts, when nothing is in flight; for a finished request, when there is no room for more
BUSY_WAIT_S = 0.02  # for a finished request or score, before asking for prompts again


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scoring:
    """Hold a generated group while the reward workers score it."""

    lease: Lease
    trajectories: tuple[Trajectory, ...]
    given: Mapping[int, Score]  # by episode: scores that the environment gave
    scores: "Future[list[Score]]"  # of the other episodes, in order
    records: Mapping[int, dict[str, Any]]  # by episode, of the environment
    span: Span


class RolloutLoop:
    """Generate and score rollouts until the coordinator reports the end of the run."""

    def __init__(
        self,
        producer_id: int,
        coordinator: ProducerCoordinator,
        engine: GenerationEngine,
        reward: GroupScorer,
        *,
        max_sequences: int,
        group_size: int,
        environment: Environment | None = None,
        by_sample: bool = False,
        cuts_overdue: bool = False,
        timeline: Timeline = NO_TIMELINE,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """Start with nothing in flight.

        Args:
            producer_id: of this producer.
            coordinator: gives leases and takes groups.
            engine: generates the samples.
            reward: scores the groups.
            max_sequences: largest number of samples in flight.
            group_size: samples of a training prompt, the greedy one of a lease with a baseline included.
            environment: of all prompts; None: a single turn.
            by_sample: ask for each sample of a single turn alone, and begin a prompt as soon as one has ended.
            cuts_overdue: end the open episodes of prompts that trainers wait for, as others would get stale.
            timeline: of the producer.
            on_turn: called at least once in IDLE_WAIT_S; what it raises ends the loop.
        """
        self._on_turn = on_turn
        self._cuts_overdue = cuts_overdue
        self._producer_id = producer_id
        self._coordinator = coordinator
        self._reward = reward
        self._timeline = timeline
        self._runner = GroupRunner(
            engine,
            environment or (SampleBySample() if by_sample else SingleTurn()),
            max_sequences=max_sequences,
            group_size=group_size,
            by_sample=by_sample,
            timeline=timeline,
        )
        self._scoring: list[_Scoring] = []
        self.is_leaving = False
        self._failed: dict[int, str] = {}  # lease -> why it could not be rolled out

    def run(self) -> None:
        """Loop until the run is over. Raises: EngineError if the engine has ended."""
        is_over = False
        try:
            while not is_over:
                with PHASES.phase("rollout loop"):
                    is_over = self._turn()
        finally:
            self._runner.close()  # the results will not be trained: stop the engine while the run ends

    def leave(self) -> None:
        """Have the loop give back its prompts and end; from any thread."""
        self.is_leaving = True
        self.wake()

    def wake(self) -> None:
        """End a wait for what is being generated, so that the next turn begins; from any thread."""
        self._runner.wake()

    def _turn(self) -> bool:
        """Run one iteration. Returns: True when the run is over."""
        self._on_turn()
        try:
            if self.is_leaving:
                self._coordinator.rejoin(self._producer_id, ())  # holds nothing any more: its prompts go to others
                return True
            if not self._take_prompts():
                return True
            for rolled_out in self._runner.take_finished(self._wait_s()):
                self._start_scoring(rolled_out)
            self._hand_in()
        except CoordinatorReplacedError as replaced:
            logger.warning("%s", replaced)
            self._rejoin()
        return False

    def _rejoin(self) -> None:
        """Tell another coordinator what is held here, and drop what it does not know."""
        scored = [item.lease.lease_id for item in self._scoring]
        held = [*self._runner.lease_ids, *scored, *self._failed]
        void = set(self._coordinator.rejoin(self._producer_id, held))
        self._runner.drop(void)
        self._scoring = [item for item in self._scoring if item.lease.lease_id not in void]
        self._failed = {lease_id: cause for lease_id, cause in self._failed.items() if lease_id not in void}

    def _wait_s(self) -> float:
        if self._is_idle():
            return 0.0  # asking for prompts waits
        return BUSY_WAIT_S if self._runner.room() else IDLE_WAIT_S

    def _is_idle(self) -> bool:
        return self._runner.is_drained and not self._scoring

    def _take_prompts(self) -> bool:
        """Lease prompts up to the engine's capacity. Returns: False when the run is over."""
        room = self._runner.room()
        if room <= 0 and not self._cuts_overdue:
            return True
        is_idle = self._is_idle()
        with self._timeline.span("wait for prompts") if is_idle else nullcontext():
            timeout_s = IDLE_WAIT_S if is_idle else 0.0
            reply = self._coordinator.lease(
                self._producer_id, max_prompts=room, timeout_s=timeout_s, is_drained=self._runner.is_drained
            )
        if reply.leases:
            self._runner.submit(reply.leases, min_policy_version=reply.policy_version)
        if self._cuts_overdue:
            self._runner.cut(reply.overdue)
        return not reply.is_finished

    def _start_scoring(self, rolled_out: RolledOut) -> None:
        lease, trajectories = rolled_out.lease, rolled_out.trajectories
        if rolled_out.error is not None:
            logger.warning("prompt %s failed: %s", lease.prompt.uid, rolled_out.error)
            self._failed[lease.lease_id] = rolled_out.error
            return
        span = self._timeline.start("score", uid=lease.prompt.uid)
        given = rolled_out.scores
        responses = [each.text for each in final_trajectories(trajectories) if each.episode not in given]
        scores: Future[list[Score]] = Future()
        if responses:
            scores = self._reward.submit(responses, lease.prompt.problem)
        else:
            scores.set_result([])
        scores.add_done_callback(self._runner.wake)
        scoring = _Scoring(
            lease=lease, trajectories=trajectories, given=given, scores=scores, records=rolled_out.records, span=span
        )
        self._scoring.append(scoring)

    def _hand_in(self) -> None:
        """Send every scored group to the coordinator, and why others could not be rolled out."""
        done: list[_Scoring] = []
        waiting: list[_Scoring] = []
        for item in self._scoring:
            (done if item.scores.done() else waiting).append(item)
        if done:
            self._coordinator.put(self._producer_id, [PackedGroup.pack(self._group(item)) for item in done])
        self._scoring = waiting
        while self._failed:
            lease_id, cause = next(iter(self._failed.items()))
            self._coordinator.fail(self._producer_id, lease_id, cause)
            del self._failed[lease_id]

    def _group(self, item: _Scoring) -> RolloutGroup:
        item.span.end()
        scores, group_size = _scores(item), item.lease.group_size
        episodes, kept = range(group_size), [each for each in item.trajectories if each.episode < group_size]
        return RolloutGroup(
            lease_id=item.lease.lease_id,
            producer_id=self._producer_id,
            prompt=item.lease.prompt,
            temperature=item.lease.sampling.temperature,
            trajectories=tuple(kept),
            scores=scores[:group_size],
            records=tuple(item.records.get(episode, {}) for episode in episodes) if item.records else (),
            baseline=_baseline(item, scores) if item.lease.has_baseline else None,
        )


def _baseline(item: _Scoring, scores: Sequence[Score]) -> Baseline:
    """Return what is kept of the greedy episode, the one after the group."""
    number = item.lease.group_size
    num_tokens = sum(each.num_loss_tokens for each in item.trajectories if each.episode == number)
    return Baseline(score=scores[number], num_tokens=num_tokens)


def _scores(item: _Scoring) -> tuple[Score, ...]:
    """Return the score of each episode: that of the environment, or the scorer's with the rewards of its turns."""
    scored, parts = iter(item.scores.result()), dict[int, list[Trajectory]]()
    for each in item.trajectories:
        parts.setdefault(each.episode, []).append(each)
    return tuple(
        given
        if (given := item.given.get(episode)) is not None
        else with_environment_rewards(
            next(scored), part, filter_score=item.records.get(episode, {}).get("filter_score")
        )
        for episode, part in parts.items()
    )
