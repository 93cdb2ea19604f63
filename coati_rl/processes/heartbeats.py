"""Receive a heartbeat of every actor each second, and end actors that do not answer.

A separate thread of the actor answers: the heartbeat shows that the process runs, and reports the phases of its other
threads. Only time in which this process ran counts as silence. `ray_heartbeats` asks actors of Ray.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from coati_rl.errors import PeerLostError
from coati_rl.observability.phases import PHASES, Phase
from coati_rl.observability.running_clock import RunningClock
from coati_rl.processes.hangs import HangTimeouts, describe_phases, judge_producer, judge_trainers

INTERVAL_S = 1.0
_END_S = 10.0  # for another node to end a process


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Report that an actor is alive, and its phases."""

    pid: int
    started_at: float  # seconds since the epoch; identifies the process together with the pid
    node_id: str  # Ray's; empty: the driver's node
    phases: tuple[Phase, ...]


def own_heartbeat(node_id: str = "") -> Heartbeat:
    """Return the heartbeat of the calling process. `node_id`: see `Heartbeat`."""
    return Heartbeat(
        pid=os.getpid(), started_at=psutil.Process().create_time(), node_id=node_id, phases=PHASES.report()
    )


@dataclass(slots=True)
class _ActorState:
    asked_at: float  # of the running clock
    answered_at: float
    reference: Any = None  # of the heartbeat that was requested
    beat: Heartbeat | None = None  # the last one received


def _end_nowhere(beat: Heartbeat) -> Callable[[float], object]:
    raise AssertionError(f"the process {beat.pid} is on another node")


class Heartbeats:
    """Track the heartbeats of all actors by name; `poll` is to be called several times a second."""

    def __init__(
        self,
        timeouts: HangTimeouts,
        *,
        ask: Callable[[Any], Any],
        answer: Callable[[Any], Heartbeat | None],
        here: str = "",
        end_there: Callable[[Heartbeat], Callable[[float], object]] = _end_nowhere,
        clock: RunningClock | None = None,
    ) -> None:
        """Store the arguments.

        Args:
            timeouts: of silence and phases.
            ask: requests a heartbeat of an actor, by its handle, and returns a reference.
            answer: returns the heartbeat of a reference, None if it has not arrived; raises PeerLostError if the actor
                is dead.
            here: the driver's node.
            end_there: kills a process of another node; returns a function that waits for that, for so many seconds.
            clock: measures silence.
        """
        self._timeouts = timeouts
        self._ask = ask
        self._answer = answer
        self._here = here
        self._end_there = end_there
        self._clock = clock or RunningClock()
        self._states: dict[str, _ActorState] = {}

    def poll(self, handles: Mapping[str, Any]) -> None:
        """Receive the answers that have arrived, and request again. An actor is watched from its first answer on."""
        now = self._clock.read()
        self._states = {name: state for name, state in self._states.items() if name in handles}
        for name, handle in handles.items():
            state = self._states.setdefault(name, _ActorState(now - INTERVAL_S, now))
            if state.reference is not None:
                try:
                    beat = self._answer(state.reference)
                except PeerLostError:  # it is dead; the supervisor learns it from its task
                    beat, state.beat, state.reference = None, None, None
                if beat is not None:
                    state.beat, state.answered_at, state.reference = beat, now, None
            if state.reference is None and now - state.asked_at >= INTERVAL_S:
                state.reference, state.asked_at = self._ask(handle), now

    def producer_problem(self, name: str) -> str | None:
        """Return why a producer has to be replaced; None if it works, or has not answered yet."""
        state = self._states.get(name)
        if state is None or state.beat is None:
            return None
        return self._silence(state) or judge_producer(state.beat.phases, self._timeouts)

    def trainers_problem(self, names: list[str]) -> str | None:
        """Return why the run cannot continue, with the trainer's name; None if all work, or have not answered yet."""
        beats = {name: w.beat for name in names if (w := self._states.get(name)) and w.beat is not None}
        for name in beats:
            if silence := self._silence(self._states[name]):
                return f"{name} hangs: {silence}; the run waits for it"
        if len(beats) < len(names):
            return None
        return judge_trainers({name: beat.phases for name, beat in beats.items()}, self._timeouts)

    def describe_phases(self) -> str:
        """Return the phases of all actors, for messages."""
        return "; ".join(
            f"{name}: {describe_phases(w.beat.phases)}" for name, w in self._states.items() if w.beat is not None
        )

    def end(self, name: str) -> Callable[[float], object] | None:
        """Kill an actor's process and its children: a stopped process does not act on a request to exit.

        Returns: a function that waits for it, if the process is on another node; None when it is done.
        """
        state = self._states.pop(name, None)
        beat = state.beat if state else None
        if beat is None:
            return None
        if beat.node_id == self._here:
            end_process(beat.pid, beat.started_at)
            return None
        return self._end_there(beat)

    def end_silent(self) -> None:
        """Kill the actors that do not answer, as the run ends."""
        silent = [name for name, state in self._states.items() if self._silence(state)]
        deadline = time.monotonic() + _END_S
        for wait in [wait for name in silent if (wait := self.end(name)) is not None]:
            wait(max(0.0, deadline - time.monotonic()))

    def _silence(self, state: _ActorState) -> str | None:
        seconds, beat = self._clock.read() - state.answered_at, state.beat
        if beat is None or seconds <= self._timeouts.heartbeat_s:
            return None
        return f"no sign of life for {seconds:.0f} s{self._state_of(beat)}; it was in '{describe_phases(beat.phases)}'"

    def _state_of(self, beat: Heartbeat) -> str:
        """Return ", its process ... is stopped" if it is stopped and on this node, else an empty text."""
        if beat.node_id == self._here:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(beat.pid)
                if process.create_time() == beat.started_at and process.status() == psutil.STATUS_STOPPED:
                    return f", its process {beat.pid} is stopped"
        return ""


def end_process(pid: int, started_at: float) -> None:
    """Kill a process of this machine and its descendants, unless its pid has been reused."""
    try:
        process = psutil.Process(pid)
        if process.create_time() != started_at:
            return
        victims = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
