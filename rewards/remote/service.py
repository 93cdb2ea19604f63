"""Serve the scores of one RewardPool as a web application.

GET /health needs no token. POST /score takes a `ScoreRequest` and needs "Authorization: Bearer TOKEN", which is read
before the body. Every answer is JSON; one that is not 200 holds an "error". A client that went away costs what it had
asked for, no more: its responses are scored into nothing.
"""

import asyncio
import functools
import hmac
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from coati_rl import __version__
from coati_rl.errors import RunError
from coati_rl.reward_spec import public_reward_type
from coati_rl.types import Problem, Score
from rewards.remote.wire import HealthReply, ScoreRequest, complaints, reply_body
from rewards.workers.pool import RewardPool


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Describe what a request may cost."""

    max_body_bytes: int = 16 << 20
    max_responses: int = 1024  # of one request
    max_queued: int = 4096  # responses accepted and not scored yet, of all requests; beyond it is 503
    body_timeout_s: float = 60.0  # for a body to arrive
    request_timeout_s: float = 600.0  # for its scores, from then on


class ScoringDesk:
    """Hands responses to the pool; knows how many wait there, which requests wait for them, and if the pool works."""

    def __init__(self, pool: RewardPool, reward_type: str, num_workers: int, max_queued: int) -> None:
        self._pool = pool
        self.reward_type = reward_type
        self._num_workers = num_workers
        self._max_queued = max_queued
        self._lock = threading.Lock()  # guards the next two; the pool's threads report here
        self._num_queued = 0
        self._failure = ""  # why the pool could not score the last group
        self._requests: set[asyncio.Task[Any]] = set()  # under way; touched by the loop's thread alone

    def submit(self, responses: Sequence[str], problem: Problem) -> Future[list[Score]] | None:
        """Queue the responses of one group; None when the queue is full. Raises as RewardPool.submit."""
        with self._lock:
            # One group is always taken, else a large one would never be.
            if self._num_queued and self._num_queued + len(responses) > self._max_queued:
                return None
            self._num_queued += len(responses)
        try:
            future = self._pool.submit(responses, problem)
        except RunError as error:
            self._forget(len(responses), str(error))
            raise
        future.add_done_callback(functools.partial(self._settle, len(responses)))
        return future

    def probe(self) -> Future[list[Score]] | None:
        """Have the pool score an empty response: it shows that a process starts."""
        return self.submit([""], Problem(ground_truth="0"))

    def health(self) -> HealthReply:
        """Tell how things are. A pool that has failed is tried again, once at a time, by whoever asks."""
        with self._lock:
            failure, num_queued = self._failure, self._num_queued
        if failure and num_queued == 0:
            with suppress(RunError):
                self.probe()
        return HealthReply(
            status="broken" if failure else "ok",
            reward_type=public_reward_type(self.reward_type),
            version=__version__,
            num_workers=self._num_workers,
            queued=num_queued,
            error=failure,
        )

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """Around the work on a request. Raises: HTTPException where `break_off` ends it."""
        task = cast(asyncio.Task[Any], asyncio.current_task())
        self._requests.add(task)
        try:
            yield
        except asyncio.CancelledError as error:
            task.uncancel()
            raise HTTPException(503, "the service ends", {"Retry-After": "1"}) from error
        finally:
            self._requests.discard(task)

    def break_off(self) -> None:
        """Have all requests under way answered with 503, so that their clients ask the service that comes next."""
        for task in self._requests:
            task.cancel()

    def _settle(self, num_responses: int, future: Future[list[Score]]) -> None:
        error = future.exception()
        self._forget(num_responses, "" if error is None else str(error))

    def _forget(self, num_responses: int, failure: str) -> None:
        with self._lock:
            self._num_queued -= num_responses
            self._failure = failure


def make_app(desk: ScoringDesk, token: str, limits: Limits) -> FastAPI:
    """The application. It serves no pages of documentation: they would need neither token nor limit."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    @app.get("/health")
    async def health() -> Response:
        reply = desk.health()
        status = HTTPStatus.OK if reply.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse(reply.model_dump(exclude=set() if reply.error else {"error"}), status)

    @app.post("/score")
    async def score(request: Request) -> Response:
        _require_token(request, token)
        async with desk.under_way():
            body = await _read_body(request, limits)
            scores = await _score(desk, _parse(body, desk.reward_type, limits), limits)
        return Response(reply_body(scores), media_type="application/json")

    @app.exception_handler(HTTPException)
    async def complain(_request: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def confess(_request: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"a fault of the service: {type(error).__name__}"}, 500)

    return app


def _require_token(request: Request, token: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # compare_digest takes as long for a token that is nearly right as for any other of its length.
    is_right = hmac.compare_digest(given.strip().encode(), token.encode())
    if scheme.lower() != "bearer" or not is_right:
        problem = "wrong token" if given else "no token"
        raise HTTPException(401, f'{problem}: send "Authorization: Bearer TOKEN"', {"WWW-Authenticate": "Bearer"})


async def _read_body(request: Request, limits: Limits) -> bytes:
    """The body; its announced length and its real one are both held to the limit."""
    too_large = HTTPException(413, f"the body is larger than {limits.max_body_bytes} bytes")
    if int(request.headers.get("content-length", "0")) > limits.max_body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.max_body_bytes:
                    raise too_large
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not arrive within {limits.body_timeout_s:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the client went away") from error
    return bytes(body)


def _parse(body: bytes, reward_type: str, limits: Limits) -> ScoreRequest:
    try:
        request = ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        raise HTTPException(422, complaints(error)) from error
    if len(request.responses) > limits.max_responses:
        raise HTTPException(422, f"responses: {len(request.responses)} of them, {limits.max_responses} are allowed")
    if request.reward_type not in (None, reward_type):
        raise HTTPException(422, f"reward_type: this service scores {reward_type!r}, not {request.reward_type!r}")
    return request


async def _score(desk: ScoringDesk, request: ScoreRequest, limits: Limits) -> list[Score]:
    if not request.responses:
        return []
    try:
        future = desk.submit(request.responses, request.problem.to_problem())
        if future is None:
            raise HTTPException(503, "too many responses wait to be scored", {"Retry-After": "1"})
        async with asyncio.timeout(limits.request_timeout_s):
            return await asyncio.wrap_future(future)
    except TimeoutError as error:
        raise HTTPException(504, f"not scored within {limits.request_timeout_s:g} s") from error
    except RunError as error:
        raise HTTPException(503, str(error), {"Retry-After": "5"}) from error
