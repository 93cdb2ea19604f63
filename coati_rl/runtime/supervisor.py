"""Watch a run from the driver until it ends.

Consumes: the coordinator's events and status. Waits for: events, and the end of any actor. Is unblocked by: either, or
the heartbeats of each second. Produces: records for the sinks, replacements of producers that are dead or hang, the
status line, and one cause if the run cannot continue.

A dead or hung producer is replaced; a dead or hung trainer, reward model or coordinator ends the run.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from coati_rl.errors import CollectiveError, PeerLostError, RunError
from coati_rl.runtime.actor_group import START_TIMEOUT_S, ActorGroup, ManagedActor
from coati_rl.runtime.remote import first_line, wait_for
from coati_rl.text import count

logger = logging.getLogger(__name__)

EVENT_WAIT_S = 0.25
CAUSE_WAIT_S = 3.0  # for the other trainers, when one has failed
FLUSH_S = 60.0  # for rollouts and evaluations to be written, when the trainers are done
KEEP_S = 5.0  # for the same, when the run has failed or was interrupted
MAX_REPLACEMENTS = 3  # per configured producer, without an optimizer step in between


class Supervisor:
    """Watch the actors until the run is over."""

    def __init__(
        self,
        actors: ActorGroup,
        on_event: Callable[[dict[str, Any]], None],
        *,
        num_producers: int,
        stall_timeout_s: float,
        on_status: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Take the callbacks; `on_status` gets, several times a second, what the run does and what it waits for."""
        self._actors = actors
        self._on_event = on_event
        self._on_status = on_status
        self._stall_timeout_s = stall_timeout_s
        self._num_seen = 0
        self._replacements_left = self._replacements = MAX_REPLACEMENTS * num_producers
        self._started_at: dict[int, float] = {}

    def run(self, interrupted_at: Callable[[], float | None] = lambda: None) -> None:
        """Return when all trainers are done, or soon after an interrupt.

        Args:
            interrupted_at: None while there is no interrupt.
        Raises: RunError with the cause that ended the run.
        """
        try:
            self._watch(interrupted_at)
        except RunError as error:
            if addresses := self._actors.dead_raylets():
                raise RunError(
                    f"Ray's raylet at {', '.join(addresses)} is dead, and the actors there with it: {error}"
                ) from error
            self._check_reward_models()  # a dead one makes every sample invalid, which may be noticed first
            raise

    def _watch(self, interrupted_at: Callable[[], float | None]) -> None:
        while interrupted_at() is None:
            self._take_events()
            if self._trainers_are_done():
                self._actors.coordinator.flush(timeout_s=FLUSH_S)
                self._take_events()
                return
            self._admit_started()
            self._replace_dead()
            self._find_hung()
            self._check_reward_models()
            status = self._actors.coordinator.status()
            self._on_status("; ".join(filter(None, (self._loading(), status.text))))
            if status.idle_s > self._stall_timeout_s:
                raise RunError(
                    f"no rollout, step or weight sync was finished for {self._stall_timeout_s:g} s: {status.text} "
                    f"({self._actors.heartbeats.describe_phases()})"
                )

    def _loading(self) -> str:
        """Say how many producers are loading their engine; nothing if none is."""
        loading, ready = len(self._actors.starting), len(self._actors.producers)
        return f"{loading} of {count(loading + ready, 'producer')} loading the model" if loading else ""

    def save(self, *, deadline: float) -> None:
        """Make the trainers write a checkpoint and end, after an interrupt.

        Args:
            deadline: seconds of the monotonic clock.
        Raises: RunError if there is no checkpoint by then, or a trainer fails.
        """
        self._actors.coordinator.stop()
        while not self._trainers_are_done():
            self._pass_on_events()
            if time.monotonic() > deadline:
                raise RunError("the checkpoint was not written in time; raise --interrupt-grace-s")
        self._actors.coordinator.flush(timeout_s=max(0.0, deadline - time.monotonic()))
        self._pass_on_events()

    def flush_records(self) -> None:
        """Write the rollouts received so far, if that is still possible, however the run ended."""
        with suppress(RunError):
            self._actors.coordinator.flush(timeout_s=KEEP_S)

    def _take_events(self) -> None:
        for event in self._pass_on_events():
            if event["event"] == "step":
                self._replacements_left = self._replacements
            elif event["event"] == "producer_lost" and event["producer"] in self._actors.producers:
                # The weight sync found it dead or hung; its process is ended in either case.
                self._replace(event["producer"], event["cause"])

    def _pass_on_events(self) -> list[dict[str, Any]]:
        events = self._actors.coordinator.events(self._num_seen, timeout_s=EVENT_WAIT_S)
        self._num_seen += len(events)
        for event in events:
            self._on_event(event)
        return events

    def _trainers_are_done(self) -> bool:
        """Return True when all trainers are done. Raises: RunError when one of them has failed."""
        errors, is_running = self._trainers_ends(timeout_s=0.0)
        if errors and is_running:  # another trainer may have failed first
            errors, _ = self._trainers_ends(timeout_s=CAUSE_WAIT_S)
        if errors:
            raise min(errors, key=_error_rank)
        return not is_running

    def _trainers_ends(self, *, timeout_s: float) -> tuple[list[RunError], bool]:
        """Return the errors of failed trainers, and whether some still run."""
        references = [member.task for member in self._actors.trainers.values()]
        done, running = ray.wait(references, num_returns=len(references), timeout=timeout_s)
        errors: list[RunError] = []
        for member in self._actors.trainers.values():
            if member.task in done:
                try:
                    wait_for(member.task, who=member.name, timeout_s=1.0)
                except RunError as error:
                    errors.append(error)
        return errors, bool(running)

    def _admit_started(self) -> None:
        for producer_id, member in list(self._actors.starting.items()):
            begin = self._started_at.setdefault(producer_id, time.monotonic())
            cause = _failure(member)
            if cause is not None:
                self._replace(producer_id, cause)
            elif _is_done(member):
                self._actors.admit_producer(producer_id)
            elif time.monotonic() - begin > START_TIMEOUT_S:
                self._replace(producer_id, f"not ready after {START_TIMEOUT_S:g} s")

    def _replace_dead(self) -> None:
        for producer_id, member in list(self._actors.producers.items()):
            cause = _failure(member)
            if cause is not None:
                self._replace(producer_id, cause)

    def _find_hung(self) -> None:
        heartbeats = self._actors.heartbeats
        heartbeats.poll({member.name: member.handle for member in self._actors.members()})
        at_work = [member.name for member in self._actors.trainers.values() if not _is_done(member)]
        if problem := heartbeats.trainers_problem(at_work):
            raise RunError(problem)
        for producer_id, member in [*self._actors.producers.items(), *self._actors.starting.items()]:
            if (problem := heartbeats.producer_problem(member.name)) is not None:
                self._replace(producer_id, problem)

    def _check_reward_models(self) -> None:
        """Raise RunError for a reward model that is dead or hangs: without it every sample would be invalid."""
        for member in self._actors.reward_models:
            if (cause := _failure(member)) is not None:
                raise RunError(f"{cause.rstrip('.')}; without it no response can be scored")
            if (problem := self._actors.heartbeats.producer_problem(member.name)) is not None:
                raise RunError(f"{member.name} hangs: {problem}; the run waits for its scores")

    def _replace(self, producer_id: int, cause: str) -> None:
        logger.info("producer-%d: %s", producer_id, cause)
        self._actors.drop_producer(producer_id, cause)
        if self._replacements_left == 0:
            raise RunError(f"producer-{producer_id}: {cause}; {self._replacements} replacements failed before it")
        self._replacements_left -= 1
        self._actors.add_producer()


def _error_rank(error: RunError) -> int:
    """Rank errors: a failing trainer breaks the others' collectives, so that other kinds of error are the cause."""
    if isinstance(error, CollectiveError):
        return 2
    return 1 if isinstance(error, PeerLostError) else 0


def _is_done(member: ManagedActor) -> bool:
    return bool(ray.wait([member.task], timeout=0)[0])


def _failure(member: ManagedActor) -> str | None:
    """Return why an actor's call failed, None if it still runs or succeeded."""
    if not _is_done(member):
        return None
    try:
        wait_for(member.task, who=member.name, timeout_s=1.0)
    except RunError as error:
        return first_line(error)
    return None
