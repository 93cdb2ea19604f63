"""Run a reward model as a Ray actor, on a device of its own, and call it from producers.

`run` blocks in one of the actor's threads; requests wait in others, and the heartbeat has a thread of its own.
"""

import functools
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
import torch

from coati_rl.config import Config
from coati_rl.errors import PeerLostError
from coati_rl.processes.actor_process import ActorContext, enter_actor
from coati_rl.processes.heartbeats import Heartbeat
from coati_rl.runtime.ray_heartbeats import actor_heartbeat
from coati_rl.text import shorten
from coati_rl.types import Device
from rewards.model.judgement import JudgedConversation, Judgement
from rewards.model.request_batcher import RequestBatcher
from rewards.model.reward_model import RewardModel

logger = logging.getLogger(__name__)


class RewardModelActor:
    """Score the responses of all producers."""

    @staticmethod
    def environment(config: Config, device: Device) -> dict[str, str]:
        """Return the environment variables that must be set before the model's process starts."""
        return {}

    def __init__(self, directory: Path, context: ActorContext) -> None:
        enter_actor(context)
        dtype = getattr(torch, context.dtype)
        self._batcher = RequestBatcher(functools.partial(RewardModel, directory, device=context.device, dtype=dtype))

    def start(self) -> float:
        """Load the model. Returns: the time it took, in seconds."""
        begin = time.perf_counter()
        self._batcher.load()
        logger.info("the reward model is ready")
        return time.perf_counter() - begin

    def run(self) -> None:
        """Score requests until the actor is killed."""
        self._batcher.run()

    def score(self, conversations: Sequence[JudgedConversation]) -> list[Judgement]:
        """Score conversations, together with those of concurrent calls."""
        return self._batcher.submit(conversations).result()

    @ray.method(concurrency_group="heartbeat")
    def beat(self) -> Heartbeat:
        """Return this process's heartbeat; answered while requests wait in all other threads."""
        return actor_heartbeat()


class RewardModelActors:
    """Implement `ModelClient` with actors that hold copies of one model.

    A request goes to the copy with the fewest requests of this client. No time limit: an actor that is dead or hangs is
    found by the supervisor, which ends the run.

    Args:
        handles: of the actors, at least one.
    """

    @staticmethod
    def find(names: Sequence[str]) -> "RewardModelActors":
        """Return a client of the run's actors with these names. Raises: PeerLostError if one has ended."""
        try:
            return RewardModelActors([ray.get_actor(name) for name in names])
        except ValueError as error:  # raised by Ray if there is no such actor
            raise PeerLostError(f"{', '.join(names)}: a reward model has ended") from error

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = [*handles]
        self._lock = threading.Lock()  # guards the next two
        self._num_open = [0] * len(self._handles)
        self._turn = itertools.cycle(range(len(self._handles)))

    def submit(self, conversations: Sequence[JudgedConversation]) -> "Future[list[Judgement]]":
        """See `ModelClient.submit`. A failed call is a problem of each conversation."""
        judged: Future[list[Judgement]] = Future()
        judged.set_running_or_notify_cancel()
        with self._lock:
            first = next(self._turn)
            order = [*range(first, len(self._handles)), *range(first)]
            copy = min(order, key=lambda index: self._num_open[index])
            self._num_open[copy] += 1
        call: Future[list[Judgement]] = self._handles[copy].score.remote(conversations).future()
        call.add_done_callback(functools.partial(self._settle, judged, copy, len(conversations)))
        return judged

    def close(self) -> None:
        """See `ModelClient.close`; the actors belong to the run."""

    def _settle(self, judged: "Future[list[Judgement]]", copy: int, size: int, call: "Future[list[Judgement]]") -> None:
        with self._lock:
            self._num_open[copy] -= 1
        error = call.exception()
        if error is None:
            judged.set_result(call.result())
        else:
            problem = f"its process failed: {type(error).__name__}: {shorten(error, 200)}"
            judged.set_result([Judgement(problem=problem)] * size)
