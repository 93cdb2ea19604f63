"""Read the bodies of requests, within a limit that holds after decompression, too."""

import io
from typing import TypeVar

import pyarrow
from fastapi import Request
from starlette.concurrency import run_in_threadpool

from coati_rl.processes import http_bodies
from coati_rl.tinker.api_error import ApiError
from coati_rl.tinker.bodies import Body

Kind = TypeVar("Kind", bound=Body)

_CHUNK_BYTES = 2**20


async def read_body(request: Request, limit: int) -> bytes:
    """Return a request's body. Raises: ApiError of status 413 if it is larger than `limit` bytes, or 400."""
    data = await http_bodies.read_body(request, max_bytes=limit, timeout_s=None, problem=_problem)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return data
    if encoding != "zstd":
        raise ApiError(400, f"Content-Encoding {encoding[:40]!r}: send zstd or none")
    return await run_in_threadpool(_decompressed, data, limit)


def _decompressed(data: bytes, limit: int) -> bytes:
    parts, size = [], 0
    try:
        with pyarrow.CompressedInputStream(io.BytesIO(data), "zstd") as stream:
            while part := stream.read(_CHUNK_BYTES):
                size += len(part)
                if size > limit:
                    raise _problem(413, f"the body has more than {limit} bytes")
                parts.append(part)
    except OSError as error:
        raise ApiError(400, f"the body is no zstd stream: {error}") from error
    return b"".join(parts)


def _problem(status: int, message: str) -> ApiError:
    return ApiError(status, f"{message}: send fewer datums, or shorter ones" if status == 413 else message)


async def read_json(request: Request, kind: type[Kind], limit: int) -> Kind:
    """Return a JSON body. Raises: ApiError, ValidationError."""
    return parse_json(await read_body(request, limit), kind)


def parse_json(data: bytes, kind: type[Kind]) -> Kind:
    """Return a JSON body. Raises: ApiError, ValidationError."""
    try:
        return kind.model_validate_json(data)
    except (RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON that can be read: {type(error).__name__}") from error
