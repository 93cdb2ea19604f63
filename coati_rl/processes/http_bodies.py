"""Read the body of an HTTP request within limits of size and time."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext

from starlette.requests import ClientDisconnect, Request


async def read_body(
    request: Request, *, max_bytes: int, timeout_s: float | None, problem: Callable[[int, str], Exception]
) -> bytes:
    """Return the body; both its announced and its actual length are limited.

    Args:
        request: of the client.
        max_bytes: of the body.
        timeout_s: until all of it has arrived; None: the server's own limits hold.
        problem: makes what is raised of an HTTP status and a message: 413, 408 or 400.
    """
    too_large = problem(413, f"the body is larger than {max_bytes} bytes")
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s) if timeout_s is not None else nullcontext():
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        raise problem(408, f"the body did not arrive within {timeout_s:g} s") from error
    except ClientDisconnect as error:
        raise problem(400, "the client disconnected") from error
    return bytes(body)
