"""Count what a served model has answered, and report it and its health over HTTP.

In: the calls of a session. Out: `GET /health` for load balancers, and `GET /metrics` in Prometheus' text format.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from coati_rl.errors import EngineError
from coati_rl.protocols import GenerationEngine
from producer.gateway.api_error import ApiError
from producer.gateway.requests import ChatRequest, CompletionRequest
from producer.gateway.session import OnText, RequestSamples, Session

_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of Prometheus
_CLIENT_GONE, _INTERNAL = 499, 500  # statuses of a call whose client has gone, and of an error that is ours


class CountedSession(Session):
    """A session that counts its calls by the status of the answer, and the tokens of those that are answered."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_by_status = Counter[int]()
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_in_flight = 0

    async def call(self, request: ChatRequest | CompletionRequest, on_text: OnText | None = None) -> RequestSamples:
        status = _INTERNAL
        self.num_in_flight += 1
        try:
            answers = await super().call(request, on_text)
            status = 200
        except ApiError as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            status = _CLIENT_GONE
            raise
        finally:
            self.num_in_flight -= 1
            self.num_by_status[status] += 1
        self.num_prompt_tokens += answers.num_prompt_tokens
        self.num_generated_tokens += sum(len(each.completion.token_ids) for each in answers.choices)
        return answers


def service_router(
    session: CountedSession, engine: GenerationEngine, check_key: Callable[[Request], object]
) -> APIRouter:
    """Return the paths of a served model beside those of the API.

    Args:
        session: whose calls are counted.
        engine: that answers them.
        check_key: raises ApiError for a request to /metrics without the key; /health needs none.
    """
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        try:
            engine.check_alive()
        except EngineError as error:
            return JSONResponse({"status": "error", "message": str(error)}, status_code=503)
        return JSONResponse({"status": "ok"})

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        check_key(request)
        return PlainTextResponse(metrics_text(session, engine.num_sequences()), media_type=_MEDIA_TYPE)

    return router


def metrics_text(session: CountedSession, num_samples: int) -> str:
    """Return the counts of a session, and how many samples are generated or wait, as Prometheus reads them."""
    statuses = {f'{{status="{status}"}}': number for status, number in sorted(session.num_by_status.items())}
    families = (
        ("coati_requests_in_flight", "gauge", "Requests that are being answered.", {"": session.num_in_flight}),
        ("coati_samples_in_flight", "gauge", "Samples that the engine generates, or that wait.", {"": num_samples}),
        ("coati_requests_total", "counter", "Requests that have ended, by status; 499: the client has gone.", statuses),
        ("coati_prompt_tokens_total", "counter", "Tokens of answered prompts.", {"": session.num_prompt_tokens}),
        ("coati_generated_tokens_total", "counter", "Tokens of answers.", {"": session.num_generated_tokens}),
    )
    lines = []
    for name, kind, what, values in families:
        lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{labels} {value}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"
