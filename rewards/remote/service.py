"""Serve the scores of one scorer as a web application.

GET /health needs no token. POST /score takes a `ScoreRequest` and needs "Authorization: Bearer TOKEN", which is read
before the body. Every reply is JSON; one with a status other than 200 holds an "error". If a client disconnects, its
responses are still scored and the scores are dropped.
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
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from coati_rl import __version__
from coati_rl.errors import RunError
from coati_rl.processes.http_bodies import read_body
from coati_rl.reward_spec import public_reward_type
from coati_rl.types import Problem, Score
from rewards.remote.wire import HealthReply, ScoreRequest, describe_errors, reply_body

if TYPE_CHECKING:  # it imports torch
    from coati_rl.protocols import GroupScorer


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """Hold the limits of requests."""

    max_body_bytes: int = 16 << 20
    max_responses: int = 1024  # of one request
    max_queued: int = 4096  # responses accepted and not scored yet, over all requests; beyond it the reply is 503
    body_timeout_s: float = 60.0  # to receive the body
    request_timeout_s: float = 600.0  # to score its responses, after the body was received


class ScoringQueue:
    """Submit responses to the pool; count waiting responses, track open requests and the pool's failure."""

    def __init__(self, pool: "GroupScorer", reward_type: str, num_workers: int, max_queued: int) -> None:
        self._pool = pool
        self.reward_type = reward_type
        self._num_workers = num_workers
        self._max_queued = max_queued
        self._lock = threading.Lock()  # guards the next two, which the pool's thread writes, too
        self._num_queued = 0
        self._failure = ""  # why the pool could not score the last group
        self._requests: set[asyncio.Task[Any]] = set()  # open requests; used by the loop's thread only

    def submit(self, responses: Sequence[str], problem: Problem) -> Future[list[Score]] | None:
        """Queue the responses of one group; None if the queue is full. Raises: RunError if it is closed."""
        with self._lock:
            # An empty queue accepts a group of any size.
            if self._num_queued and self._num_queued + len(responses) > self._max_queued:
                return None
            self._num_queued += len(responses)
        try:
            future: Future[list[Score]] = self._pool.submit(responses, problem)
        except RunError as error:
            self._forget(len(responses), str(error))
            raise
        future.add_done_callback(functools.partial(self._settle, len(responses)))
        return future

    def probe(self) -> Future[list[Score]] | None:
        """Score an empty response, which shows that a process starts."""
        return self.submit([""], Problem(ground_truth="0"))

    def health(self) -> HealthReply:
        """Return the service's state. If the pool has failed, each call also starts a new attempt, one at a time."""
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
    async def track_request(self) -> AsyncIterator[None]:
        """Register the current task as an open request. Raises: HTTPException if `abort_requests` cancels it."""
        task = cast(asyncio.Task[Any], asyncio.current_task())
        self._requests.add(task)
        try:
            yield
        except asyncio.CancelledError as error:
            task.uncancel()
            raise HTTPException(503, "the service is shutting down", {"Retry-After": "1"}) from error
        finally:
            self._requests.discard(task)

    def abort_requests(self) -> None:
        """Answer all open requests with 503, so that their clients retry with the service that is started next."""
        for task in self._requests:
            task.cancel()

    def _settle(self, num_responses: int, future: Future[list[Score]]) -> None:
        error = future.exception()
        self._forget(num_responses, "" if error is None else str(error))

    def _forget(self, num_responses: int, failure: str) -> None:
        with self._lock:
            self._num_queued -= num_responses
            self._failure = failure


def make_app(queue: ScoringQueue, token: str, limits: RequestLimits) -> FastAPI:
    """Build the application, without documentation pages, which would need neither token nor limit."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    @app.get("/health")
    async def health() -> Response:
        reply = queue.health()
        status = HTTPStatus.OK if reply.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse(reply.model_dump(exclude=set() if reply.error else {"error"}), status)

    @app.post("/score")
    async def score(request: Request) -> Response:
        _require_token(request, token)
        async with queue.track_request():
            body = await read_body(
                request, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s, problem=HTTPException
            )
            scores = await _score(queue, _parse(body, queue.reward_type, limits), limits)
        return Response(reply_body(scores), media_type="application/json")

    @app.exception_handler(HTTPException)
    async def report_http_error(_request: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def report_internal_error(_request: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"internal error of the service: {type(error).__name__}"}, 500)

    return app


def _require_token(request: Request, token: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # compare_digest takes the same time for all tokens of the same length.
    is_right = hmac.compare_digest(given.strip().encode(), token.encode())
    if scheme.lower() != "bearer" or not is_right:
        problem = "wrong token" if given else "no token"
        raise HTTPException(401, f'{problem}: send "Authorization: Bearer TOKEN"', {"WWW-Authenticate": "Bearer"})


def _parse(body: bytes, reward_type: str, limits: RequestLimits) -> ScoreRequest:
    try:
        request = ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        raise HTTPException(422, describe_errors(error)) from error
    if len(request.responses) > limits.max_responses:
        raise HTTPException(422, f"responses: got {len(request.responses)}, at most {limits.max_responses} are allowed")
    if request.reward_type not in (None, reward_type):
        raise HTTPException(422, f"reward_type: this service scores {reward_type!r}, not {request.reward_type!r}")
    return request


async def _score(queue: ScoringQueue, request: ScoreRequest, limits: RequestLimits) -> list[Score]:
    if not request.responses:
        return []
    try:
        future = queue.submit(request.responses, request.problem.to_problem())
        if future is None:
            raise HTTPException(503, "too many responses are waiting to be scored", {"Retry-After": "1"})
        async with asyncio.timeout(limits.request_timeout_s):
            return await asyncio.wrap_future(future)
    except TimeoutError as error:
        raise HTTPException(504, f"not scored within {limits.request_timeout_s:g} s") from error
    except RunError as error:
        raise HTTPException(503, str(error), {"Retry-After": "5"}) from error
