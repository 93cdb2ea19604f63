"""Refuse requests in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}} with a status code."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}  # of a status code; others: 4xx as 400, 5xx "server_error"


class ApiError(Exception):
    """Report why a request is not answered.

    Args:
        status: of HTTP. Clients of openai repeat 408, 409, 429 and 5xx, unless `is_final`.
        message: one line that names the field and the remedy.
        param: the field at fault, as OpenAI's API names it.
        code: a word for programs.
        is_final: a repeated request would be refused, too.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, is_final: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {"x-should-retry": "false"} if is_final else {}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        elif status == 429:
            self.headers["Retry-After"] = "1"

    @property
    def body(self) -> dict[str, Any]:
        """Return the reply's JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


async def reply_to_api_error(_request: Request, error: Exception) -> JSONResponse:
    """Answer an ApiError, and what the framework refuses by itself: unknown paths and methods."""
    if isinstance(error, HTTPException):
        return _reply(ApiError(error.status_code, str(error.detail)), error.headers)
    if isinstance(error, ApiError):
        return _reply(error)
    return _reply(ApiError(500, f"internal error of the gateway: {type(error).__name__}", is_final=True))


def _reply(error: ApiError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error.body, error.status, {**error.headers, **(headers or {})})
