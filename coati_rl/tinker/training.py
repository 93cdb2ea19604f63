"""Put the requests of each model in order, have them computed, and restore models after a kill.

A model's requests are computed by their seq_id, whatever the order of their arrival, and each once: one that comes
again gets the first one's future. A request is in the journal before its client hears of it. After a kill a model is
loaded from its automatic checkpoint, and the requests since are computed again: a loss that then differs by a bit
fails the model, instead of going on from other weights.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool

from coati_rl.tinker.api_error import ApiError, not_found
from coati_rl.tinker.bases import Bases
from coati_rl.tinker.core import LossRequest, RequestError
from coati_rl.tinker.futures import Future, Futures, failure
from coati_rl.tinker.journal import Journal, Record
from coati_rl.tinker.limits import Limits
from coati_rl.tinker.operations import Operations, Outcome
from coati_rl.tinker.scheduler import Job
from coati_rl.tinker.state import LOSS, STEP, Model, Reply, Request, State, reply_record
from coati_rl.tinker.wire import read_forward_backward, write_forward_backward

logger = logging.getLogger(__name__)

_SMALL_COST = 256  # tokens that a request without data counts as
_MAX_EARLY = 4096  # requests of a model that wait for an earlier one


@dataclass(kw_only=True, slots=True)
class _Line:
    """Hold the place in line of a model's requests."""

    next_seq: int = 0
    early: dict[int, tuple[Request, LossRequest | None]] = field(default_factory=dict)
    blocked_since: float | None = None  # of a monotonic clock
    failure: str | None = None  # why none of its requests can be computed
    lost: str | None = None  # why its gradient or weights are not known; set on the scheduler's thread
    steps: int = 0  # since its automatic checkpoint
    num_bytes: int = 0  # of bodies since then


class Training:
    """Run the requests of models."""

    def __init__(
        self, state: State, journal: Journal, futures: Futures, bases: Bases, operations: Operations, limits: Limits
    ) -> None:
        self._state, self._journal, self._futures = state, journal, futures
        self._bases, self._operations, self._limits = bases, operations, limits
        self._lines: dict[str, _Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.published: Callable[[Model, Request, str], None]  # gets a directory of weights for samplers

    def find(self, name: str, owner: str) -> Model:
        """Return an owner's model. Raises: ApiError of status 404."""
        model = self._state.models.get(name)
        if model is None or model.owner != owner:
            raise not_found("model", name)
        return model

    async def create(self, model: Model, op: str, args: Mapping[str, Any]) -> str:
        """Add a model, whose request 0 is its creation. Returns: the id of its future."""
        if model.id not in self._state.models:
            own = [each for each in self._state.models.values() if each.owner == model.owner]
            if len(own) >= self._limits.max_models:
                raise ApiError(400, f"this key has {len(own)} models, as many as it may: end a session of its own")
            fields = {name: getattr(model, name) for name in ("id", "owner", "session", "base", "metadata")}
            self._journal.append_soon(self._state.apply(Record(fields={"kind": "model", **fields})))
            self._lines[model.id] = _Line()
        return await self.accept(self._state.models[model.id], 0, op, args)

    async def accept(
        self,
        model: Model,
        seq: int,
        op: str,
        args: Mapping[str, Any],
        body: bytes = b"",
        loss: LossRequest | None = None,
    ) -> str:
        """Take a request to be computed in its turn. Returns: the id of its future, when it is in the journal."""
        line, request = self._lines[model.id], model.requests.get(seq)
        if request is not None and not request.is_forgotten:
            if (known := self._futures.get(request.id)) is not None:
                await known.accepted.wait()
            return request.id
        if seq < line.next_seq:
            raise ApiError(404, f"seq_id {seq} of {model.id} was answered, and its answer retrieved, some time ago")
        if seq - line.next_seq > _MAX_EARLY:
            raise ApiError(400, f"seq_id {seq}: the next of {model.id} is {line.next_seq}")
        name = uuid.uuid4().hex
        future = self._futures.add(name, model.owner)
        fields = {"kind": "request", "id": name, "model": model.id, "seq": seq, "op": op, "args": dict(args)}
        record = self._state.apply(Record(fields=fields, body=body))
        rest = self._keep(self._enter(model, line, model.requests[seq], loss, record, future))
        await asyncio.shield(rest)  # a client that hangs up does not leave a request half taken
        return name

    async def _enter(
        self, model: Model, line: _Line, request: Request, loss: LossRequest | None, record: Record, future: Future
    ) -> None:
        """Put a request in line when it is in the journal."""
        try:
            await self._journal.append(record)
        except OSError as error:
            line.failure = f"the server's journal cannot be written: {error}; free space there, and restart the server"
            self._futures.finish(request.id, failure(line.failure, "server"))
            raise ApiError(400, line.failure) from error
        finally:
            future.accepted.set()
        if self._lines.get(model.id) is line:  # else it ended meanwhile
            line.early[request.seq] = request, loss
            self._advance(model, line)

    def _advance(self, model: Model, line: _Line) -> None:
        """Submit the requests whose turn it is."""
        while line.next_seq in line.early:
            request, loss = line.early.pop(line.next_seq)
            line.next_seq += 1
            self._submit(model, line, request, loss)
        line.blocked_since = (line.blocked_since or time.monotonic()) if line.early else None

    def _submit(self, model: Model, line: _Line, request: Request, loss: LossRequest | None) -> None:
        line.num_bytes += len(request.body)
        line.steps += request.op == STEP
        limits = self._limits
        saves = request.op == STEP and (line.steps >= limits.save_steps or line.num_bytes >= limits.save_bytes)
        if saves:
            line.steps = line.num_bytes = 0
        work = None if loss is not None else partial(self._run, model, request, saves=saves)
        cost = sum(len(datum.tokens) for datum in loss.data) if loss is not None else _SMALL_COST
        finish, check = partial(self._finish, model, line, request), partial(_checked, line, request)
        self._submit_job(model, cost, finish, check, loss=loss, work=work)

    def _submit_job(self, model: Model, cost: int, finish: Any, check: Any = None, **others: Any) -> None:
        """Submit a job; `check` gets its result before the next job begins, and returns the one that counts."""
        loop = asyncio.get_running_loop()

        def done(result: Any) -> None:
            result = result if check is None else check(result)
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish, result)

        job = Job(owner=model.owner, model=model.id, cost=cost, done=done, **others)
        self._bases.scheduler(model.base).submit(job)

    def _run(self, model: Model, request: Request, core: Any, *, saves: bool) -> Outcome:
        line = self._lines.get(model.id)
        failed = "the model's session has ended" if line is None else line.failure or line.lost
        if failed is not None:
            raise RequestError(failed)
        return self._operations.run(core, model, request, saves=saves)

    def _finish(self, model: Model, line: _Line, request: Request, result: Any) -> None:
        """Record an answer, on the event loop."""
        outcome = self._outcome(line, request, result)
        if self._lines.get(model.id) is not line:  # it ended meanwhile
            return
        if request.seq == 0 and outcome.reply.is_error:
            line.failure = f"{model.id} was not created: {result}"
        if request.op == LOSS and request.reply not in (None, outcome.reply):  # computed again after a kill
            line.failure = (
                f"{model.id}: after a restart of the server request {request.seq} did not come out as before; go on "
                "from your last saved checkpoint"
            )
            logger.error("%s", line.failure)
        if outcome.directory is not None:  # before the answer names the sampler
            self.published(model, request, outcome.directory)
        before, reply = model.saved_in, request.reply or outcome.reply
        record = self._state.apply(reply_record(request, reply, **outcome.effects))
        if "saved_in" in outcome.effects and before is not None:
            self._keep(self._replace(record, before))
        else:
            self._journal.append_soon(record)
        self._futures.finish(request.id, reply)

    async def _replace(self, record: Record, before: str) -> None:
        """Delete an automatic checkpoint when the journal names the next one."""
        await self._journal.append(record)
        self._operations.forget(before)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _outcome(self, line: _Line, request: Request, result: Any) -> Outcome:
        if line.failure is not None:
            return Outcome(reply=failure(line.failure))
        if isinstance(result, Outcome):
            return result
        if isinstance(result, (RequestError, ApiError)):
            return Outcome(reply=failure(str(result)))
        if isinstance(result, BaseException):
            return Outcome(reply=failure(f"the server failed: {type(result).__name__}: {result}", "server"))
        return Outcome(reply=Reply(body=write_forward_backward(result), is_proto=True))

    def end(self, model: Model) -> None:
        """Free what a model has; its records are the caller's matter."""
        self._lines.pop(model.id, None)
        scheduler = self._bases.scheduler(model.base)
        scheduler.drop(model.id)
        scheduler.submit(
            Job(owner=model.owner, model=model.id, cost=0, done=_ignore, work=lambda core: core.drop(model.id))
        )
        self._operations.forget(model.saved_in)
        for request in model.requests.values():
            self._futures.discard(request.id)

    def fail_blocked(self) -> None:
        """Fail requests that have waited too long for an earlier one, which does not seem to come."""
        limit = time.monotonic() - self._limits.gap_timeout_s
        for name, line in self._lines.items():
            if line.blocked_since is None or line.blocked_since > limit:
                continue
            missing, first = line.next_seq, min(line.early)
            text = f"request {missing} of {name} never came, and request {first} has waited for it; begin a new client"
            line.failure = line.failure or text
            line.next_seq = first
            self._advance(self._state.models[name], line)

    async def restore(self) -> None:
        """Bring back the models of the journal, and go on with their requests."""
        for model in list(self._state.models.values()):
            line = self._lines[model.id] = _Line(next_seq=model.saved_seq + 1)
            if model.saved_in is not None:
                self._submit_job(model, _SMALL_COST, partial(_restored, model, line), work=partial(self._load, model))
            for seq, request in sorted(model.requests.items()):
                if not request.is_forgotten:
                    future = self._futures.add(request.id, model.owner, is_limited=False)
                    future.accepted.set()
                    if request.reply is not None:
                        self._futures.finish(request.id, request.reply)
                if seq > model.saved_seq:
                    line.early[seq] = request, await _read_loss(request)
            self._advance_restored(model, line)

    def _load(self, model: Model, core: Any) -> None:
        self._operations.restore(core, model)

    def _advance_restored(self, model: Model, line: _Line) -> None:
        for seq, (request, _) in sorted(line.early.items()):
            if seq == line.next_seq and request.reply is not None and not request.changes_model:
                line.early.pop(seq)
                line.next_seq += 1
            elif seq == line.next_seq:
                self._submit(model, line, *line.early.pop(seq))
                line.next_seq += 1
        self._advance(model, line)


def _checked(line: _Line, request: Request, result: Any) -> Any:
    """Return a result, or the error that a model has from the first request on that left it in no known state.

    A call that ends in an exception may have added a part of its gradient, or changed a part of the weights.
    """
    is_refused = isinstance(result, (RequestError, ApiError))
    has_failed = isinstance(result, BaseException) and not is_refused
    failed_before = request.reply is not None and request.reply.is_error and not is_refused  # it is computed again
    if request.op in (LOSS, STEP) and request.changes_model and (has_failed or failed_before):
        cause = f"{type(result).__name__}: {result}"[:500] if has_failed else "before a restart"  # room for the remedy
        line.lost = line.lost or (
            f"request {request.seq} failed in the server ({cause}), so that {request.model} has no known gradient and "
            "weights; go on from your last saved checkpoint; if memory ran out, with fewer or shorter sequences"
        )
    return result if line.lost is None else RequestError(line.lost)


def _ignore(_: Any) -> None:
    """Take a result that nobody waits for."""


def _restored(model: Model, line: _Line, result: Any) -> None:
    if isinstance(result, BaseException):
        line.failure = f"{model.id} could not be restored after a restart of the server: {result}"
        logger.error("%s", line.failure)


async def _read_loss(request: Request) -> LossRequest | None:
    if request.op != LOSS or (request.reply is not None and not request.changes_model):
        return None
    return (await run_in_threadpool(read_forward_backward, request.body))[0]
