"""Answer sampling requests: publish a sampler's weights when they are first asked for, and withdraw what is not used.

A name in the sampling part is never used for other weights. A request's seed is drawn when it is taken, so that a
request that is computed again after a kill has the same answer.
"""

import asyncio
import logging
import secrets
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from coati_rl.tinker.api_error import not_found
from coati_rl.tinker.bases import Base, Bases
from coati_rl.tinker.core import RequestError, SampleRequest
from coati_rl.tinker.futures import Futures, failure
from coati_rl.tinker.journal import Journal, Record
from coati_rl.tinker.limits import Limits
from coati_rl.tinker.operations import Operations
from coati_rl.tinker.state import Model, Reply, Request, Sample, Sampler, State
from coati_rl.tinker.wire import write_sample

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class _Published:
    """Hold weights that are in a sampling part."""

    name: str  # there
    base: Base
    ready: asyncio.Task[None]
    num_running: int = 0


@dataclass(kw_only=True, slots=True)
class _Weights:
    """Hold what is published, by `Sampler.weights`; the one that was used last is the last."""

    published: OrderedDict[str, _Published] = field(default_factory=OrderedDict)
    unwanted: set[str] = field(default_factory=set)  # to be withdrawn after their last request


class Sampling:
    """Run sampling requests."""

    def __init__(
        self,
        state: State,
        journal: Journal,
        futures: Futures,
        bases: Bases,
        operations: Operations,
        limits: Limits,
        root: Path,
    ) -> None:
        self._state, self._journal, self._futures, self._bases = state, journal, futures, bases
        self._operations, self._limits, self._root = operations, limits, root
        self._weights = _Weights()
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, name: str, owner: str) -> Sampler:
        """Return an owner's sampler. Raises: ApiError of status 404."""
        sampler = self._state.samplers.get(name)
        if sampler is None or sampler.owner != owner:
            raise not_found("sampler", name)
        return sampler

    def add(self, sampler: Sampler) -> Record:
        """Add a sampler, or give one other weights. Returns: the record for the journal."""
        fields = {name: getattr(sampler, name) for name in Sampler.__dataclass_fields__ if name != "samples"}
        return self._state.apply(Record(fields={"kind": "sampler", **fields}))

    def take_published(self, model: Model, request: Request, directory: str) -> None:
        """Make samplers of weights that a model has published; its inflight samplers move to them."""
        name, is_inflight = request.args["sampler"], request.args["is_inflight"]
        moved = [each for each in self._state.samplers.values() if is_inflight and each.follows == model.id]
        old = {each.weights for each in moved}
        for each in moved:
            each.directory = directory
            self._journal.append_soon(self.add(each))
        self._journal.append_soon(
            self.add(
                Sampler(
                    id=name,
                    owner=model.owner,
                    session=model.session,
                    base=model.base,
                    directory=directory,
                    follows=model.id if is_inflight else None,
                )
            )
        )
        for unused in old - {directory}:
            self.drop_weights(unused)

    async def accept(self, sampler: Sampler, seq: int, args: Mapping[str, Any]) -> str:
        """Take a request. Returns: the id of its future. Raises: RequestError, ApiError."""
        known = sampler.samples.get(seq)
        if known is not None:
            if (future := self._futures.get(known.id)) is not None:
                await future.accepted.wait()
            return known.id
        self._bases.find(sampler.base).sampling.check(_request("", args))
        name = uuid.uuid4().hex
        future = self._futures.add(name, sampler.owner)
        fields = {"kind": "sample", "id": name, "sampler": sampler.id, "seq": seq}
        record = self._state.apply(Record(fields=fields | {"args": dict(args)}))
        try:
            await asyncio.shield(asyncio.ensure_future(self._journal.append(record)))
        finally:
            future.accepted.set()
        self._start(sampler, sampler.samples.get(seq))
        return name

    def _start(self, sampler: Sampler, sample: Sample | None) -> None:
        future = self._futures.get(sample.id) if sample is not None else None
        if sample is None or future is None:
            return  # its session has ended meanwhile
        task = asyncio.create_task(self._answer(sampler, sample))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        future.cancel = task.cancel

    async def _answer(self, sampler: Sampler, sample: Sample) -> None:
        try:
            reply = await self._sample(sampler, sample)
        except RequestError as error:
            reply = failure(str(error))
        except asyncio.CancelledError:
            reply = failure("the request was cancelled")
        except Exception as error:
            logger.exception("a sampling request failed")
            reply = failure(f"the server failed: {type(error).__name__}: {error}", "server")
        self._futures.finish(sample.id, reply)

    async def _sample(self, sampler: Sampler, sample: Sample) -> Reply:
        base = self._bases.find(sampler.base)
        if sampler.directory is None:
            result = await base.sampling.sample(_request("", sample.args))
            return Reply(body=write_sample(result), is_proto=True)
        published = self._publish(base, sampler.directory, sampler.made_by, str(sampler.weights))
        published.num_running += 1
        try:
            await asyncio.shield(published.ready)
            result = await base.sampling.sample(_request(published.name, sample.args))
        finally:
            published.num_running -= 1
            self._withdraw_unused()
        return Reply(body=write_sample(result), is_proto=True)

    def _publish(self, base: Base, directory: str, made_by: str, key: str) -> _Published:
        """Return a directory's weights in the sampling part, with a name of their own."""
        weights = self._weights
        found = weights.published.get(key)
        if found is not None and found.ready.done() and (found.ready.cancelled() or found.ready.exception()):
            found = None  # it may succeed now
        if found is None:
            name = uuid.uuid4().hex
            ready = asyncio.create_task(self._load(base, name, directory, made_by))
            found = weights.published[key] = _Published(name=name, base=base, ready=ready)
        weights.published.move_to_end(key)
        return found

    async def _load(self, base: Base, name: str, directory: str, made_by: str) -> None:
        """Publish a directory's weights. Raises: RequestError if another checkpoint has taken their place."""
        if made_by:
            await run_in_threadpool(self._operations.check_made_by, directory, made_by)
        await run_in_threadpool(base.sampling.publish, name, self._root / directory)
        if not made_by:
            return
        try:  # again: it may have been replaced while it was read
            await run_in_threadpool(self._operations.check_made_by, directory, made_by)
        except RequestError:
            base.sampling.withdraw(name)
            raise

    def drop_weights(self, key: str | None) -> None:
        """Withdraw weights, and delete them unless they are a checkpoint's."""
        if key is not None:
            self._weights.unwanted.add(key)
            self._withdraw_unused()

    def _withdraw_unused(self) -> None:
        weights = self._weights
        idle = [name for name, each in weights.published.items() if not each.num_running and each.ready.done()]
        surplus = len(weights.published) - self._limits.max_published
        for index, key in enumerate(idle):
            if key in weights.unwanted or index < surplus:
                gone = weights.published.pop(key)
                if not gone.ready.cancelled() and gone.ready.exception() is None:
                    gone.base.sampling.withdraw(gone.name)
        for key in [each for each in weights.unwanted if each not in weights.published]:
            weights.unwanted.discard(key)
            self._operations.forget_sampler(key)

    def end(self, sampler: Sampler) -> None:
        """Free what a sampler has; its records are the caller's matter."""
        for sample in sampler.samples.values():
            future = self._futures.get(sample.id)
            if future is not None and future.cancel is not None:
                future.cancel()
            self._futures.discard(sample.id)
        others = [each for each in self._state.samplers.values() if each is not sampler]
        if sampler.weights not in {each.weights for each in others}:
            self.drop_weights(sampler.weights)

    async def close(self) -> None:
        """End the requests in progress; a next server computes them again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def restore(self) -> None:
        """Bring back the futures of the journal; each is computed again when its answer is asked for."""
        for sampler in self._state.samplers.values():
            for sample in sampler.samples.values():
                future = self._futures.add(sample.id, sampler.owner, is_limited=False)
                future.accepted.set()
                future.start = lambda sampler=sampler, sample=sample: self._start(sampler, sample)


def draw_seed() -> int:
    """Return a seed for a request that gives none."""
    return secrets.randbits(62)


def _request(sampler: str, args: Mapping[str, Any]) -> SampleRequest:
    return SampleRequest(sampler=sampler, **args)
