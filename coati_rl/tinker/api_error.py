"""Refuse requests in the form of Tinker's API, with a status that its client does not repeat.

The client repeats 408, 409, 429 and 5xx for minutes: a mistake is 400, 404, 413 or 422, and 429 a full queue alone.
"""

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from coati_rl.tinker.core import RequestError

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """Report why a request is not answered: a status of HTTP, and a line with field and remedy."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def not_found(what: str, name: str) -> ApiError:
    """Return the error for a name that is unknown, or another key's: the two look alike."""
    return ApiError(404, f"no {what} {name[:200]!r}: it was deleted, has expired, or belongs to another key")


def handle_errors(app: FastAPI) -> None:
    """Have an application answer all errors in this form."""
    for kind in (ApiError, RequestError, ValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, ApiError):
        return _reply(error.status, error.message)
    if isinstance(error, RequestError):
        return _reply(400, str(error))
    if isinstance(error, ValidationError):
        return _reply(422, _describe(error.errors(include_url=False, include_context=False)))
    if isinstance(error, HTTPException):  # of the framework: an unknown path or method
        return _reply(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _reply(400, f"internal error of the server: {type(error).__name__}; its log has the cause")


def _describe(errors: Sequence[Any]) -> str:
    """Return one line of a validation's first problems."""
    parts = [f"{'.'.join(str(part) for part in each['loc']) or 'body'}: {each['msg']}" for each in errors[:3]]
    return "; ".join(parts)[:1000]


def _reply(status: int, message: str) -> JSONResponse:
    text = message.encode("utf-8", "replace").decode()  # a lone surrogate of the client's text has no UTF-8
    return JSONResponse({"error": text, "detail": text, "category": "user"}, status)
