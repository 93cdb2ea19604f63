"""Watch a run from the driver until it ends.

Consumes: the coordinator's events and status. Waits for: events, and the end of any actor. Is unblocked by: either, or
the heartbeats of each second. Produces: records for the sinks, replacements of producers that are dead or hang, the
status line, and one cause if the run cannot continue.

A dead or hung producer is replaced; a dead or hung trainer, scorer, reward model or coordinator ends the run.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from coati_rl.driver.actors import Actors, Member
from coati_rl.errors import CollectiveError, PeerLostError, RunError
from coati_rl.processes.actor_classes import START_TIMEOUT_S
from coati_rl.text import count, first_line

logger = logging.getLogger(__name__)

EVENT_WAIT_S = 0.25
CAUSE_WAIT_S = 3.0  # for the other trainers, when one has failed
FLUSH_S = 60.0  # for rollouts and evaluations to be written, when the trainers are done
KEEP_S = 5.0  # for the same, when the run has failed or was interrupted
_LOOK_FOR_ROOM_S = 2.0  # between looks for a node with room for a producer
_LOOK_S = 0.05  # between looks at trainers that end
MAX_REPLACEMENTS = 3  # per configured producer, without an optimizer step in between


class Supervisor:
    """Watch the actors until the run is over."""

    def __init__(
        self,
        actors: Actors,
        on_event: Callable[[dict[str, Any]], None],
        *,
        num_producers: int,
        stall_timeout_s: float,
        max_producers: int | None = None,
        takes_joining: bool = False,
        on_status: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Take what is watched.

        Args:
            actors: of the run.
            on_event: gets the coordinator's events.
            num_producers: at the start.
            stall_timeout_s: for which nothing may be finished.
            max_producers: where they join and leave as there is room; None: a lost one is replaced.
            takes_joining: producers of other machines may join over HTTPS.
            on_status: gets, several times a second, what the run does and what it waits for.
        """
        self._actors = actors
        self._on_event = on_event
        self._on_status = on_status
        self._stall_timeout_s = stall_timeout_s
        self._max_producers = max_producers
        self._takes_joining = takes_joining
        self._next_look = 0.0  # for room, seconds of the monotonic clock
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
            self._check_models()  # a dead one makes samples invalid, or trainers fail, which may be noticed first
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
            self._add_where_room()
            self._find_hung()
            self._check_models()
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
        events: list[dict[str, Any]] = self._actors.coordinator.events(self._num_seen, timeout_s=EVENT_WAIT_S)
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
        deadline, running = time.monotonic() + timeout_s, list(self._actors.trainers.values())
        errors: list[RunError] = []
        while True:
            done = [member for member in running if member.is_done()]
            running = [member for member in running if member not in done]
            errors += [error for member in done if (error := _error(member)) is not None]
            if not running or time.monotonic() >= deadline:
                return errors, bool(running)
            time.sleep(_LOOK_S)

    def _admit_started(self) -> None:
        for producer_id, member in list(self._actors.starting.items()):
            begin = self._started_at.setdefault(producer_id, time.monotonic())
            cause = _failure(member)
            if cause is not None:
                self._replace(producer_id, cause)
            elif member.is_done():
                self._actors.admit_producer(producer_id)
            elif time.monotonic() - begin > START_TIMEOUT_S:
                self._replace(producer_id, f"not ready after {START_TIMEOUT_S:g} s")

    def _replace_dead(self) -> None:
        for producer_id, member in list(self._actors.producers.items()):
            cause = _failure(member)
            if cause is not None:
                self._replace(producer_id, cause)
            elif member.is_done() and member.result() is True:
                cause = "its machine goes" if member.is_joined else "its node goes"
                self._actors.drop_producer(producer_id, cause, leaves=True)

    def _add_where_room(self) -> None:
        """Start producers as nodes join, one at a time, up to the largest number; admit all that join over HTTPS."""
        if self._takes_joining:
            self._actors.add_joining()
        if self._max_producers is None or time.monotonic() < self._next_look or self._actors.starting:
            return
        if len(self._actors.producers) < self._max_producers:
            self._actors.add_producer_if_room()
        self._next_look = time.monotonic() + _LOOK_FOR_ROOM_S

    def _find_hung(self) -> None:
        heartbeats = self._actors.heartbeats
        heartbeats.poll({member.name: member.handle for member in self._actors.members()})
        at_work = [member.name for member in self._actors.trainers.values() if not member.is_done()]
        if problem := heartbeats.trainers_problem(at_work):
            raise RunError(problem)
        for producer_id, member in [*self._actors.producers.items(), *self._actors.starting.items()]:
            if (problem := heartbeats.producer_problem(member.name)) is not None:
                self._replace(producer_id, problem)

    def _check_models(self) -> None:
        """Raise RunError for a reward model or a scorer that is dead or hangs: nothing can be trained without it."""
        for members, lost in (
            (self._actors.reward_models, "no response can be scored"),
            (self._actors.scorers, "reference and teacher cannot be compared with"),
        ):
            for member in members:
                if (cause := _failure(member)) is not None:
                    raise RunError(f"{cause.rstrip('.')}; without it {lost}")
                if (problem := self._actors.heartbeats.producer_problem(member.name)) is not None:
                    raise RunError(f"{member.name} hangs: {problem}; the run waits for its scores")

    def _replace(self, producer_id: int, cause: str) -> None:
        logger.info("producer-%d: %s", producer_id, cause)
        member = self._actors.producers.get(producer_id) or self._actors.starting.get(producer_id)
        if producer_id in self._actors.starting:  # the coordinator does not know it yet
            self._on_event({"event": "producer_lost", "producer": producer_id, "cause": cause, "prompts_reissued": 0})
        self._actors.drop_producer(producer_id, cause)
        if member is not None and member.is_joined:
            return
        if self._replacements_left == 0:
            raise RunError(f"producer-{producer_id}: {cause}; {self._replacements} replacements failed before it")
        self._replacements_left -= 1
        if self._max_producers is None:
            self._actors.add_producer()


def _error_rank(error: RunError) -> int:
    """Rank errors: a failing trainer breaks the others' collectives, so that other kinds of error are the cause."""
    if isinstance(error, CollectiveError):
        return 2
    return 1 if isinstance(error, PeerLostError) else 0


def _error(member: Member) -> RunError | None:
    """Return the error of a call that has ended, None if it has succeeded."""
    try:
        member.result()
    except RunError as error:
        return error
    return None


def _failure(member: Member) -> str | None:
    """Return why an actor's call failed, None if it still runs or succeeded."""
    error = _error(member) if member.is_done() else None
    return None if error is None else first_line(error)
