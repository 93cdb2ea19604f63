"""One HTTP call, tried until it succeeds or its deadline passes: a body flows out, the body of the reply flows in.

Asynchronous, because nothing else ends on time whatever the other side does: a timeout of a blocking socket starts anew
with every byte that trickles in. No redirect is followed (it would carry the token elsewhere), no cookie is kept, no
.netrc is read, no compressed reply is unpacked.
"""

import asyncio
import ipaddress
import random
from collections.abc import Coroutine, Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from time import time
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from coati_rl.errors import ConfigError
from rewards.text import shorten

RETRY_STATUSES = frozenset({429, 502, 503})  # no 504: what took too long is not asked for again
MAX_REPLY_BYTES = 64 << 20
_CONNECT_TIMEOUT_S = 10.0  # per address; a machine that is gone does not answer at all
_FIRST_PAUSE_S = 0.2  # doubled with each attempt
_LONGEST_PAUSE_S = 10.0

T = TypeVar("T")


class CallError(Exception):
    """The call failed for good; the message says why, on one line."""


class CallRefusedError(CallError):
    """The other side gave an answer that another attempt would not change."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status  # of HTTP; 0 if there was none


class CallTimeoutError(CallError):
    """The deadline has passed; the message names the last attempt's failure."""


class _AttemptFailedError(Exception):
    """One attempt failed, the next may not."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s  # what the other side asked for


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in an event loop of its own.

    asyncio.run waits for threads without a limit at its end; a name server that does not answer holds such a thread.
    """
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def new_session() -> aiohttp.ClientSession:
    """A session for `call`; to be made where an event loop runs."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
    )


async def call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    deadline: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """The body of the first reply with status 200.

    Connection errors and the statuses 429, 502, 503 and 504 are tried again, after a pause that grows and is random in
    part, so that many clients do not come back at once; never before the time that a Retry-After asks for.

    Args:
        deadline: when the whole call has to be over, in seconds of time.monotonic.
    Raises: CallRefusedError for any other status and for a reply above 64 MiB; CallTimeoutError.
    """
    clock = asyncio.get_running_loop().time
    started, num_attempts, reason = clock(), 0, "no reply"
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                return await _attempt(session, method, url, body, headers)
        except TimeoutError:
            break
        except _AttemptFailedError as failure:
            reason, num_attempts = str(failure), num_attempts + 1
            pause_s = _pause_s(num_attempts, failure.retry_after_s)
        if clock() + pause_s >= deadline:
            break
        await asyncio.sleep(pause_s)
    raise CallTimeoutError(f"{reason} (gave up after {clock() - started:.1f} s, {num_attempts} failed attempts)")


def check_url(url: str, *, flag: str, allows_query: bool = False) -> str:
    """The URL of a server, as it was given.

    Raises: ConfigError when it is no http:// or https:// URL with a host.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number, or of half an IPv6 address
        is_valid = False
    if not is_valid or any(character <= " " for character in url):
        raise ConfigError(f"{flag} {url!r} is no address; write http://HOST:PORT")
    if parts.fragment or (parts.query and not allows_query):
        raise ConfigError(
            f"{flag} {url!r}: write the address without what follows the {'#' if parts.fragment else '?'}"
        )
    return url


async def _attempt(
    session: aiohttp.ClientSession, method: str, url: str, body: bytes | None, headers: Mapping[str, str] | None
) -> bytes:
    try:
        async with session.request(
            method, url, data=body, headers=headers, allow_redirects=False, proxy=_proxy(url)
        ) as reply:
            content = await _read(reply)
    except (aiohttp.InvalidURL, aiohttp.ClientSSLError, ValueError) as error:
        raise CallRefusedError(f"{type(error).__name__}: {shorten(error, 200)}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise _AttemptFailedError(shorten(str(error) or type(error).__name__, 200)) from error
    if reply.status == HTTPStatus.OK:
        return content
    reason = f"status {reply.status}: {shorten(content.decode(errors='replace'), 200)}"
    if reply.status in RETRY_STATUSES:
        raise _AttemptFailedError(reason, _retry_after_s(reply.headers.get("Retry-After", "")))
    if 300 <= reply.status < 400:
        reason = f"status {reply.status}: a redirect to {reply.headers.get('Location', '?')}, which is not followed"
    raise CallRefusedError(reason, reply.status)


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for piece in reply.content.iter_chunked(1 << 16):
        content += piece
        if len(content) > MAX_REPLY_BYTES:
            raise CallRefusedError(f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB", reply.status)
    return bytes(content)


def _pause_s(num_attempts: int, retry_after_s: float) -> float:
    backoff_s = min(_FIRST_PAUSE_S * 2.0 ** min(num_attempts - 1, 16), _LONGEST_PAUSE_S)
    return retry_after_s + backoff_s * random.uniform(0.5, 1.0)


def _retry_after_s(header: str) -> float:
    """Seconds to wait; the header holds a number or a date, 0 if it holds neither."""
    try:
        return max(float(header), 0.0) if header.strip().isdigit() else _seconds_until(header)
    except (ValueError, OverflowError):
        return 0.0


def _seconds_until(date: str) -> float:
    return max(parsedate_to_datetime(date).timestamp() - time(), 0.0)


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for this URL; none for this machine, which no proxy can reach."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host == "localhost" or _is_loopback(host) or proxy_bypass(host):
        return None
    return getproxies().get(parts.scheme)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
