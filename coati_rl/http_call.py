"""Make an HTTP call, and retry it until it succeeds or its deadline passes.

It is asynchronous so that the deadline always holds: the timeout of a blocking socket restarts with every received
byte. Redirects are not followed (they would send the token to another server), and compressed replies are not unpacked.
"""

import asyncio
import ssl
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from time import time
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import tenacity
from tenacity import wait

from coati_rl.errors import ConfigError
from coati_rl.reward_url import redacted
from coati_rl.text import shorten

RETRY_STATUSES = frozenset({429, 502, 503})  # not 504: a call that took too long is not repeated
MAX_REPLY_BYTES = 64 << 20
_CONNECT_TIMEOUT_S = 10.0  # a machine that is down does not answer at all
_THIS_MACHINE = ("all://localhost", "all://127.0.0.0/8", "all://[::1]")

T = TypeVar("T")


class HttpCallError(Exception):
    """Report that the call failed permanently, with the cause on one line."""


class CallRefusedError(HttpCallError):
    """Report a reply that another attempt would not change."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status  # of HTTP; 0 if there was none


class _AttemptFailedError(Exception):
    """Report that one attempt failed; the next may succeed."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s  # requested by the server


# 0.2 s, doubled with each attempt up to 10 s; half of it is random, so that many clients do not retry at the same time.
# At least the time that the server asks for.
_PAUSE = (
    wait.wait_exponential(multiplier=0.1, max=5.0)
    + wait.wait_random_exponential(multiplier=0.1, max=5.0)
    + wait.wait_exception(lambda error: getattr(error, "retry_after_s", 0.0))
)
_SSL_CONTEXT = httpx2.create_ssl_context()  # made once: it reads the machine's certificates


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a new event loop.

    Unlike asyncio.run it does not wait for threads at its end, which a name server that does not answer can block.
    """
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def new_client(max_connections: int = 100) -> httpx2.AsyncClient:
    """Create a client for `call`. It uses the environment's proxy, except for this machine.

    Args:
        max_connections: at a time; further calls wait.
    Raises: CallRefusedError for a proxy that cannot be used.
    """
    try:
        return httpx2.AsyncClient(
            verify=_SSL_CONTEXT,
            mounts=dict.fromkeys(_THIS_MACHINE),
            timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=max_connections, max_keepalive_connections=20),
            headers={"Accept-Encoding": "identity"},
        )
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        raise CallRefusedError(f"the proxy in the environment: {shorten(error, 200)}") from error


async def call(
    client: httpx2.AsyncClient,
    method: str,
    url: str,
    *,
    deadline: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    max_reply_bytes: int = MAX_REPLY_BYTES,
) -> bytes:
    """Return the body of the first reply with status 200.

    Connection errors and the statuses 429, 502 and 503 are retried after increasing pauses.

    Args:
        client: see `new_client`.
        method: HTTP method.
        url: of the server.
        deadline: end of the whole call, in seconds of time.monotonic.
        body: of the request.
        headers: of the request.
        max_reply_bytes: of its body; a longer one is not read to its end.
    Raises: CallRefusedError for any other status and for a longer reply; HttpCallError past the deadline,
            with the last attempt's failure.
    """
    clock = asyncio.get_running_loop().time
    started, reason = clock(), "no reply"
    attempts = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(_AttemptFailedError),
        wait=_PAUSE,
        stop=tenacity.stop_before_delay(deadline - started),
    )
    with suppress(tenacity.RetryError, TimeoutError):
        async with asyncio.timeout_at(deadline):
            async for attempt in attempts:
                with attempt:
                    return await _attempt(client, method, url, body, headers, max_reply_bytes)
                # An attempt that the deadline cuts off says nothing: then the one before it is the reason.
                reason = str((attempt.retry_state.outcome and attempt.retry_state.outcome.exception()) or "") or reason
    raise HttpCallError(f"{reason} (gave up after {clock() - started:.1f} s)")


def check_url(url: str, *, flag: str, allows_query: bool = False) -> str:
    """Check the URL of a server and return it unchanged.

    Raises: ConfigError if it is not an http:// or https:// URL with a host.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, or an incomplete IPv6 address
        is_valid = False
    if not is_valid or any(character <= " " for character in url):
        raise ConfigError(f"{flag} {redacted(url)!r} is not an address; write http://HOST:PORT")
    if parts.fragment or (parts.query and not allows_query):
        raise ConfigError(
            f"{flag} {redacted(url)!r}: write the address without what follows the {'#' if parts.fragment else '?'}"
        )
    return url


async def _attempt(
    client: httpx2.AsyncClient,
    method: str,
    url: str,
    body: bytes | None,
    headers: Mapping[str, str] | None,
    max_reply_bytes: int,
) -> bytes:
    try:
        async with client.stream(method, url, content=body, headers=headers) as reply:
            content = bytearray()
            async for piece in reply.aiter_raw():
                content += piece
                if len(content) > max_reply_bytes:
                    raise CallRefusedError(f"a reply of more than {max_reply_bytes >> 20} MiB", reply.status_code)
    except httpx2.TransportError as error:
        cause = _cause(error)
        reason = shorten(str(cause) or type(cause).__name__, 200)
        if isinstance(cause, ssl.SSLError):
            raise CallRefusedError(reason) from error
        raise _AttemptFailedError(reason) from error
    except (httpx2.InvalidURL, ValueError) as error:
        raise CallRefusedError(f"{type(error).__name__}: {shorten(error, 200)}") from error
    if reply.status_code == HTTPStatus.OK:
        return bytes(content)
    reason = f"status {reply.status_code}: {shorten(content.decode(errors='replace'), 200)}"
    if reply.status_code in RETRY_STATUSES:
        raise _AttemptFailedError(reason, _retry_after_s(reply.headers.get("Retry-After", "")))
    if reply.is_redirect:
        reason = f"status {reply.status_code}: a redirect to {reply.headers['Location']}, which is not followed"
    raise CallRefusedError(reason, reply.status_code)


def _cause(error: BaseException) -> BaseException:
    """Return the underlying OSError, since the client only reports that "all connection attempts failed"."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def _retry_after_s(header: str) -> float:
    """Return the seconds to wait from a header that holds a number or a date; 0 if it holds neither."""
    try:
        is_number = header.strip().isdigit()
        return max(float(header) if is_number else parsedate_to_datetime(header).timestamp() - time(), 0.0)
    except (ValueError, OverflowError):
        return 0.0
