"""Serve the live page of one run to browsers of this machine that know the token.

All paths begin with the token. GET / is the page; GET /changes what the files have gained since the positions in the
query; GET /steps/N a step's groups and rollouts; POST /annotations keeps a note. Errors are JSON with an "error".
"""

import hmac
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from coati_rl.errors import CoatiError
from coati_rl.report.annotations import MAX_NOTE_BYTES, Note, annotate
from coati_rl.report.escaped_json import as_json
from coati_rl.report.live import changes, live_page, step_rollouts
from coati_rl.run_reader.run_directory import RunDirectory

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def make_app(run: RunDirectory, token: str) -> FastAPI:
    """Build the application of a run."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(CoatiError, _coati_error)

    def admit(request: Request, given: str) -> None:
        """Refuse a wrong token, and names by which a page from elsewhere could reach this machine."""
        if urlsplit(f"//{request.headers.get('host', '')}").hostname not in _LOOPBACK:
            raise HTTPException(403, "this page is served to this machine alone")
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise HTTPException(404, "no such page")

    router = APIRouter(prefix="/{given}", dependencies=[Depends(admit)])

    @router.get("/")
    def page() -> Response:
        return HTMLResponse(live_page(run), headers=_HEADERS)

    @router.get("/changes")
    def new(request: Request) -> Response:
        return _json(changes(run, dict(request.query_params)))

    @router.get("/steps/{step}")
    def step(step: int) -> Response:
        return _json(step_rollouts(run, step))

    @router.post("/annotations")
    async def note(request: Request, body: Annotated[bytes, Depends(_body)]) -> Response:
        if request.headers.get("origin") != f"http://{request.headers.get('host')}":
            raise HTTPException(403, "notes are taken from this server's own page alone")
        try:
            given = Note.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            raise HTTPException(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        await run_in_threadpool(annotate, run.path, given)
        return _json({})

    app.include_router(router)
    return app


async def _body(request: Request) -> bytes:
    """Return the body of a request, which is bounded."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_NOTE_BYTES:
            raise HTTPException(413, f"the note is larger than {MAX_NOTE_BYTES} bytes")
    return bytes(body)


def _json(data: Any, status: int = 200) -> Response:
    return Response(as_json(data), status, _HEADERS, "application/json")


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101, as registered
    return _json({"error": error.detail}, error.status_code)


async def _coati_error(_request: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, 409)
