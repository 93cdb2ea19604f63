"""Roll out leased prompts. Consumes: leases. Waits for: the engine, the reward workers, prompts. Is unblocked by:
finished requests, finished scores, a new lease. Produces: scored rollout groups.

A prompt in flight is generating, then scoring; at most `max_sequences` samples generate at a time, and a finished
prompt makes room for the next at once: there is no barrier between prompts.
"""

import logging
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass

from coati_rl.data.episodes import final_trajectories
from coati_rl.data.packed_group import PackedGroup
from coati_rl.observability.phases import PHASES
from coati_rl.observability.timeline import NO_TIMELINE, Span, Timeline
from coati_rl.protocols import GenerationEngine, GroupScorer, ProducerCoordinator
from coati_rl.types import Lease, RolloutGroup, Score, Trajectory
from producer.environments.single_turn import single_turns
from producer.generation import Generated, LeaseGenerator

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0  # for prompts, when nothing is in flight; for a finished request, when there is no room for more
BUSY_WAIT_S = 0.02  # for a finished request or score, before asking for prompts again


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scoring:
    """A generated group on its way through the reward workers."""

    lease: Lease
    trajectories: tuple[Trajectory, ...]
    scores: "Future[list[Score]]"  # of each episode
    span: Span


class RolloutLoop:
    """Rolls out prompts until the coordinator has no more."""

    def __init__(
        self,
        producer_id: int,
        coordinator: ProducerCoordinator,
        engine: GenerationEngine,
        reward: GroupScorer,
        *,
        max_sequences: int,
        group_size: int,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        """`max_sequences`: samples that generate at a time; `group_size`: samples of a training prompt."""
        self._producer_id = producer_id
        self._coordinator = coordinator
        self._reward = reward
        self._timeline = timeline
        self._generator = LeaseGenerator(engine, max_sequences=max_sequences, group_size=group_size, timeline=timeline)
        self._scoring: list[_Scoring] = []

    def run(self) -> None:
        """Returns when the run is over. Raises EngineError when the engine died."""
        is_over = False
        try:
            while not is_over:
                with PHASES.phase("rollout loop"):
                    is_over = self._turn()
        finally:
            self._generator.abort()  # nobody trains on it: the engine shall not go on while the run ends

    def _turn(self) -> bool:
        """One round; True when the run is over."""
        if not self._take_prompts():
            return True
        for generated in self._generator.take_finished(self._wait_s()):
            self._start_scoring(generated)
        self._hand_in()
        return False

    def _wait_s(self) -> float:
        if self._is_idle():
            return 0.0  # asking for prompts waits
        return BUSY_WAIT_S if self._generator.room() else IDLE_WAIT_S

    def _is_idle(self) -> bool:
        return self._generator.is_drained and not self._scoring

    def _take_prompts(self) -> bool:
        """Fill the engine; False when the run is over."""
        room = self._generator.room()
        if room <= 0:
            return True
        is_idle = self._is_idle()
        with self._timeline.span("wait for prompts") if is_idle else nullcontext():
            timeout_s = IDLE_WAIT_S if is_idle else 0.0
            reply = self._coordinator.lease(
                self._producer_id, max_prompts=room, timeout_s=timeout_s, is_drained=self._generator.is_drained
            )
        for lease in reply.leases:
            self._generator.submit(lease, min_policy_version=reply.policy_version)
        return not reply.is_finished

    def _start_scoring(self, generated: Generated) -> None:
        lease, result = generated.lease, generated.result
        if result.error is not None:
            logger.warning("prompt %s failed: %s", lease.prompt.uid, result.error)
            self._coordinator.fail(self._producer_id, lease.lease_id, result.error)
            return
        span = self._timeline.start("score", uid=lease.prompt.uid)
        trajectories = single_turns(lease.prompt, result.completions, temperature=lease.sampling.temperature)
        scores = self._reward.submit([each.text for each in final_trajectories(trajectories)], lease.prompt.problem)
        scores.add_done_callback(self._generator.wake)
        self._scoring.append(_Scoring(lease=lease, trajectories=trajectories, scores=scores, span=span))

    def _hand_in(self) -> None:
        """Send every group whose scores are there."""
        done: list[_Scoring] = []
        waiting: list[_Scoring] = []
        for item in self._scoring:
            (done if item.scores.done() else waiting).append(item)
        self._scoring = waiting
        if done:
            self._coordinator.put(self._producer_id, [PackedGroup.pack(self._group(item)) for item in done])

    def _group(self, item: _Scoring) -> RolloutGroup:
        item.span.end()
        return RolloutGroup(
            lease_id=item.lease.lease_id,
            producer_id=self._producer_id,
            prompt=item.lease.prompt,
            temperature=item.lease.sampling.temperature,
            trajectories=item.trajectories,
            scores=tuple(item.scores.result()),
        )
