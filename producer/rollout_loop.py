"""The producer's loop. Consumes: leases. Waits for: the engine, the reward workers, prompts. Is unblocked by: finished
requests, finished scores, a new lease. Produces: scored rollout groups.

A prompt in flight is generating, then scoring; at most `max_in_flight` generate at a time, and a finished one makes
room for the next at once: there is no barrier between prompts.
"""

import logging
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass

from coati_rl.data.episodes import final_trajectories
from coati_rl.data.packed_group import PackedGroup
from coati_rl.data.single_turn import single_turns
from coati_rl.observability.phases import PHASES
from coati_rl.observability.timeline import NO_TIMELINE, Span, Timeline
from coati_rl.protocols import GenerationEngine, GroupScorer, ProducerCoordinator
from coati_rl.types import GenerationRequest, GenerationResult, Lease, RolloutGroup, Score, Trajectory

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0  # for prompts, when nothing is in flight
BUSY_WAIT_S = 0.02  # for a finished request, before looking at scores and leases again


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
        max_in_flight: int,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self._producer_id = producer_id
        self._coordinator = coordinator
        self._engine = engine
        self._reward = reward
        self._max_in_flight = max_in_flight
        self._timeline = timeline
        self._generating: dict[str, tuple[Lease, Span]] = {}
        self._scoring: list[_Scoring] = []

    def run(self) -> None:
        """Returns when the run is over. Raises EngineError when the engine died."""
        is_over = False
        while not is_over:
            with PHASES.phase("rollout loop"):
                is_over = self._turn()

    def _turn(self) -> bool:
        """One round; True when the run is over."""
        if not self._take_prompts():
            return True
        for result in self._engine.poll(BUSY_WAIT_S if self._generating else 0.0):
            self._start_scoring(result)
        self._hand_in()
        return False

    def _take_prompts(self) -> bool:
        """Fill the engine; False when the run is over."""
        room = self._max_in_flight - len(self._generating)
        if room <= 0:
            return True
        is_idle = not self._generating and not self._scoring
        with self._timeline.span("wait for prompts") if is_idle else nullcontext():
            timeout_s = IDLE_WAIT_S if is_idle else 0.0
            reply = self._coordinator.lease(
                self._producer_id, max_prompts=room, timeout_s=timeout_s, is_drained=not self._generating
            )
        for lease in reply.leases:
            request = GenerationRequest(
                request_id=f"lease-{lease.lease_id}",
                token_ids=lease.prompt.token_ids,
                num_samples=lease.group_size,
                sampling=lease.sampling,
                min_policy_version=reply.policy_version,
            )
            span = self._timeline.start("generate", uid=lease.prompt.uid)
            self._generating[request.request_id] = lease, span
            self._engine.submit(request)
        return not reply.is_finished

    def _start_scoring(self, result: GenerationResult) -> None:
        lease, span = self._generating.pop(result.request_id)
        span.end(tokens=sum(len(c.token_ids) for c in result.completions))
        if result.error is not None:
            logger.warning("prompt %s failed: %s", lease.prompt.uid, result.error)
            self._coordinator.fail(self._producer_id, lease.lease_id, result.error)
            return
        span = self._timeline.start("score", uid=lease.prompt.uid)
        trajectories = single_turns(lease.prompt, result.completions, temperature=lease.sampling.temperature)
        scores = self._reward.submit([each.text for each in final_trajectories(trajectories)], lease.prompt.problem)
        self._scoring.append(_Scoring(lease=lease, trajectories=trajectories, scores=scores, span=span))

    def _hand_in(self) -> None:
        """Send every group whose scores are there; wait for a score only when there is nothing else to do."""
        if self._scoring and not self._generating:
            wait([item.scores for item in self._scoring], timeout=BUSY_WAIT_S, return_when=FIRST_COMPLETED)
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
