"""Share one training part out to owners: requests of different models are computed together, each owner has a share.

Consumes: jobs, in the order of each model. Waits for: jobs. Is unblocked by: `close`. Who has used least comes first
(start-time fair queueing); the cost of a job is its number of tokens, so that a huge one counts as what it is. The
first job of each model is a candidate; loss requests of several models are one call, up to `batch_tokens`.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from coati_rl.tinker.core import LossRequest, RequestError, TrainingCore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Hold a job of a model: a loss request, or other work on the training part."""

    owner: str
    model: str
    cost: int  # tokens
    done: Callable[[Any], None]  # gets the result, or the exception; called on the scheduler's thread
    loss: LossRequest | None = None
    work: Callable[[TrainingCore], Any] | None = None


class Scheduler:
    """Run jobs on a thread of its own."""

    def __init__(self, core: TrainingCore, *, batch_tokens: int) -> None:
        self._core, self._batch_tokens = core, batch_tokens
        self._queues: dict[str, dict[str, deque[Job]]] = {}  # by owner and model, in turn
        self._used: dict[str, float] = {}  # tokens, by owner
        self._now = 0.0  # what the one that was served last had used
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Add a job after the model's others."""
        with self._changed:
            if job.owner not in self._queues:  # a share is not saved up while there is nothing to do
                self._used[job.owner] = max(self._used.get(job.owner, 0.0), self._now)
            self._queues.setdefault(job.owner, {}).setdefault(job.model, deque()).append(job)
            self._changed.notify()

    def drop(self, model: str) -> list[Job]:
        """Take back a model's jobs that have not begun."""
        dropped: list[Job] = []
        with self._changed:
            for queues in self._queues.values():
                dropped += queues.pop(model, ())
            self._queues = {owner: queues for owner, queues in self._queues.items() if queues}
        return dropped

    def close(self) -> None:
        """End the thread after the call in progress, and the training part."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._core.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queues or self._is_closed)
                if self._is_closed:
                    return
                jobs = self._take()
            self._compute(jobs)

    def _take(self) -> list[Job]:
        """Take the first job of who has used least, and for a loss those of other models that fit beside it."""
        taken: list[Job] = []
        room = self._batch_tokens
        for owner, model, job in self._candidates():
            if taken and (job.loss is None or job.cost > room):
                continue
            taken.append(job)
            room -= job.cost
            self._remove(owner, model)
            if job.loss is None:
                break
        return taken

    def _candidates(self) -> Iterator[tuple[str, str, Job]]:
        """Yield the first job of each model: owners by what they used, and an owner's models in turn."""
        owners = sorted(self._queues, key=lambda owner: self._used[owner])
        queues = {owner: iter(list(self._queues[owner].items())) for owner in owners}
        if owners:
            self._now = self._used[owners[0]]
        while queues:
            for owner in list(queues):
                model, jobs = next(queues[owner], (None, None))
                if model is None or jobs is None:
                    del queues[owner]
                else:
                    yield owner, model, jobs[0]

    def _remove(self, owner: str, model: str) -> None:
        jobs = self._queues[owner].pop(model)
        self._used[owner] += jobs.popleft().cost
        if jobs:
            self._queues[owner][model] = jobs  # now the last of the owner's models
        if not self._queues[owner]:
            del self._queues[owner]

    def _compute(self, jobs: list[Job]) -> None:
        losses = [job for job in jobs if job.loss is not None]
        try:
            if not losses:
                results = [job.work(self._core) for job in jobs if job.work is not None]
            else:
                jobs, results = self._losses(losses)
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("a training request failed")
            results = [error] * len(jobs)
        for job, result in zip(jobs, results, strict=True):
            job.done(result)

    def _losses(self, jobs: list[Job]) -> tuple[list[Job], list[Any]]:
        """Compute loss requests that can be computed. Returns: jobs and their results, the refused ones first."""
        refused: list[tuple[Job, RequestError]] = []
        for job in jobs:
            try:
                self._core.check(job.loss)  # type: ignore[arg-type]
            except RequestError as error:
                refused.append((job, error))
        bad = {id(job) for job, _ in refused}
        good = [job for job in jobs if id(job) not in bad]
        results = self._core.forward_backward([job.loss for job in good if job.loss is not None]) if good else []
        return [job for job, _ in refused] + good, [error for _, error in refused] + list(results)
