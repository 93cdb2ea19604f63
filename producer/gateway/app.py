"""Answer OpenAI's API over HTTP: chat completions, completions, models, and the reward of an episode.

A token is checked before the body is read. If a client disconnects, its call ends and its request is aborted in the
engine. Streams are server-sent events; the first one is sent with the first token.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from coati_rl.processes import http_bodies
from producer.gateway.api_error import ApiError, reply_to_api_error
from producer.gateway.event_stream import EventStream
from producer.gateway.replies import ReplyWriter
from producer.gateway.requests import ChatRequest, CompletionRequest, read_request
from producer.gateway.served_models import ServedModels
from producer.gateway.session import Session

Result = TypeVar("Result")
FindSession = Callable[[Request], Session]  # Raises: ApiError


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """Limit what a client sends."""

    max_bytes: int = 16 << 20
    timeout_s: float = 60.0


def make_app(find: FindSession, *, prefix: str, models: ServedModels, limits: BodyLimits | None = None) -> FastAPI:
    """Build the application, without documentation pages, which would need no token.

    Args:
        find: returns the session that a request may use.
        prefix: of all paths, such as "/v1"; with a parameter that `find` reads, if it has one.
        models: what requests may name.
        limits: of bodies.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for error in (ApiError, HTTPException, Exception):
        app.add_exception_handler(error, reply_to_api_error)
    app.include_router(_router(find, models, limits or BodyLimits()), prefix=prefix)
    return app


def _router(find: FindSession, served: ServedModels, limits: BodyLimits) -> APIRouter:
    router = APIRouter()

    async def session(request: Request) -> Session:
        return find(request)

    Found = Annotated[Session, Depends(session)]

    @router.get("/models")
    async def models(_session: Found) -> Response:
        return JSONResponse({"object": "list", "data": served.listed()})

    @router.get("/models/{name:path}")
    async def one_model(_session: Found, name: str) -> Response:
        return JSONResponse(served.described(name))

    @router.post("/chat/completions")
    async def chat(request: Request, session: Found) -> Response:
        body = await read_body(request, limits)
        return await _reply(request, session, read_request(body, ChatRequest), served)

    @router.post("/completions")
    async def completions(request: Request, session: Found) -> Response:
        body = await read_body(request, limits)
        return await _reply(request, session, read_request(body, CompletionRequest), served)

    return router


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """Return the body. Raises: ApiError if it exceeds the limits."""
    return await http_bodies.read_body(
        request, max_bytes=limits.max_bytes, timeout_s=limits.timeout_s, problem=ApiError
    )


async def _reply(
    request: Request, session: Session, asked: ChatRequest | CompletionRequest, served: ServedModels
) -> Response:
    writer = ReplyWriter(asked, model=served.find(asked.model), decode=session.decode)
    if not asked.stream:
        answers = await _unless_disconnected(request, session.call(asked))
        return JSONResponse(writer.whole(answers))
    stream = EventStream(session, asked, writer)
    try:
        await _unless_disconnected(request, stream.begin())
    except BaseException:
        stream.close()
        raise
    return _EventResponse(stream)


class _EventResponse(StreamingResponse):
    """Send a stream, and end its call when the response ends, whatever ends it."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__(stream.events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work on a reply; cancel it if the client disconnects. Raises: ApiError then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client disconnected")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
