"""Ask every actor each second for a sign of life, and end those that give none.

A beat is answered by a thread of the actor beside those that compute: it shows that the process runs, and brings what
its threads are doing. Only time in which this process ran counts as silence.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError

from coati_rl.observability.phases import PHASES, Phase
from coati_rl.observability.running_clock import RunningClock
from coati_rl.runtime.hangs import HangTimeouts, doing, judge_producer, judge_trainers

INTERVAL_S = 1.0
_END_S = 10.0  # for another node to end a process


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A sign of life of an actor."""

    pid: int
    started_at: float  # seconds since the epoch; with the pid it names the process
    node_id: str
    phases: tuple[Phase, ...]


def own_beat() -> Beat:
    """Of the actor that calls."""
    return Beat(
        pid=os.getpid(),
        started_at=psutil.Process().create_time(),
        node_id=ray.get_runtime_context().get_node_id(),
        phases=PHASES.report(),
    )


@dataclass(slots=True)
class _Watched:
    asked_at: float  # of the running clock
    answered_at: float
    reference: Any = None  # of the beat that is under way
    beat: Beat | None = None  # the last one


def _ask(handle: Any) -> Any:
    return handle.beat.remote()


def _answer(reference: Any) -> Beat | None:
    """A beat that was asked for, None if it is not there yet. Raises: RayError if the actor is dead."""
    try:
        beat: Beat = ray.get(reference, timeout=0)
    except GetTimeoutError:
        return None
    return beat


class Heartbeats:
    """Of all actors by name; to be looked at several times a second."""

    def __init__(
        self,
        patience: HangTimeouts,
        *,
        ask: Callable[[Any], Any] = _ask,
        answer: Callable[[Any], Beat | None] = _answer,
        clock: RunningClock | None = None,
    ) -> None:
        self._patience = patience
        self._ask = ask
        self._answer = answer
        self._clock = clock or RunningClock()
        self._watched: dict[str, _Watched] = {}

    def look(self, handles: Mapping[str, Any]) -> None:
        """Take the answers that have come, and ask again. An actor is watched from its first answer on."""
        now = self._clock.read()
        self._watched = {name: watched for name, watched in self._watched.items() if name in handles}
        for name, handle in handles.items():
            watched = self._watched.setdefault(name, _Watched(now - INTERVAL_S, now))
            if watched.reference is not None:
                try:
                    beat = self._answer(watched.reference)
                except RayError:  # it is dead, which its work's end will tell
                    beat, watched.beat, watched.reference = None, None, None
                if beat is not None:
                    watched.beat, watched.answered_at, watched.reference = beat, now, None
            if watched.reference is None and now - watched.asked_at >= INTERVAL_S:
                watched.reference, watched.asked_at = self._ask(handle), now

    def producer_problem(self, name: str) -> str | None:
        """Why a producer has to be replaced; None if it works, or cannot be asked yet."""
        watched = self._watched.get(name)
        if watched is None or watched.beat is None:
            return None
        return self._silence(watched) or judge_producer(watched.beat.phases, self._patience)

    def trainers_problem(self, names: list[str]) -> str | None:
        """Why the run cannot go on, by the name of a trainer; None if all work, or cannot be asked yet."""
        beats = {name: w.beat for name in names if (w := self._watched.get(name)) and w.beat is not None}
        for name in beats:
            if silence := self._silence(self._watched[name]):
                return f"{name} hangs: {silence}; the run waits for it"
        if len(beats) < len(names):
            return None
        return judge_trainers({name: beat.phases for name, beat in beats.items()}, self._patience)

    def doing(self) -> str:
        """Return what everyone does, for messages."""
        return "; ".join(f"{name}: {doing(w.beat.phases)}" for name, w in self._watched.items() if w.beat is not None)

    def end(self, name: str) -> Any:
        """Kill an actor's process and its children: a stopped one does not follow Ray's request to exit.

        Returns: a reference to wait for, where another node does it; None when it is done.
        """
        watched = self._watched.pop(name, None)
        beat = watched.beat if watched else None
        if beat is None:
            return None
        if beat.node_id == ray.get_runtime_context().get_node_id():
            end_process(beat.pid, beat.started_at)
            return None
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(beat.node_id, soft=False)
        task = ray.remote(end_process).options(num_cpus=0, scheduling_strategy=there)
        return task.remote(beat.pid, beat.started_at)  # nobody waits: the node may be lost, which takes Ray a while

    def end_silent(self) -> None:
        """Kill those that do not answer, as the run ends."""
        silent = [name for name, watched in self._watched.items() if self._silence(watched)]
        references = [reference for name in silent if (reference := self.end(name)) is not None]
        if references:
            ray.wait(references, num_returns=len(references), timeout=_END_S)

    def _silence(self, watched: _Watched) -> str | None:
        seconds, beat = self._clock.read() - watched.answered_at, watched.beat
        if beat is None or seconds <= self._patience.heartbeat_s:
            return None
        return f"no sign of life for {seconds:.0f} s{_state(beat)}; it was in '{doing(beat.phases)}'"


def _state(beat: Beat) -> str:
    """That its process is stopped, if it is and can be seen from here."""
    if beat.node_id == ray.get_runtime_context().get_node_id():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(beat.pid)
            if process.create_time() == beat.started_at and process.status() == psutil.STATUS_STOPPED:
                return f", its process {beat.pid} is stopped"
    return ""


def end_process(pid: int, started_at: float) -> None:
    """Kill a process of this machine and all below it, unless another one has its number by now."""
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
