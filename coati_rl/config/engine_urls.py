"""Read the value of -b: the name of an engine, or the URLs of servers that were started elsewhere.

Each URL is one inference engine: producer i uses the i-th one.
"""

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from coati_rl.reward_url import redacted

ENGINES = ("vllm", "transformers", "fake")


def server_urls(backend: str) -> tuple[str, ...]:
    """Return the URLs of a value of -b in order, without a slash at the end; none if it names an engine."""
    return tuple(url.strip().rstrip("/") for url in backend.split(",")) if "://" in backend else ()


def _check_backend(backend: str) -> str:
    """Return the value. Raises: ValueError for another engine, and for what is no URL of a server."""
    urls = server_urls(backend)
    if not urls and backend not in ENGINES:
        raise ValueError("use vllm, transformers, fake or http://HOST:PORT of vLLM or SGLang")
    for url in urls:
        _check_url(url)
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise ValueError(f"{twice} is given twice; each server is one engine")
    return backend


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, or an incomplete IPv6 address
        is_valid = False
    if not is_valid or parts.query or parts.fragment or any(character <= " " for character in url):
        raise ValueError(f"{redacted(url)!r} is not the address of a server; write http://HOST:PORT")
    if "@" in url:  # the address is written into the run's files
        raise ValueError(f"{redacted(url)!r}: leave user and password out of the address")


Backend = Annotated[str, AfterValidator(_check_backend)]


class ServerShares:
    """Give each producer a server of its own; the replacement of a lost producer gets that of the lost one."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Begin without producers. `urls`: none if engines are the run's own."""
        self._urls = tuple(urls)
        self._taken: dict[int, str] = {}  # by producer

    def take(self, producer_id: int) -> str:
        """Return the first server that no producer has, for this one; empty if engines are the run's own."""
        if not self._urls:
            return ""
        self._taken[producer_id] = next(url for url in self._urls if url not in self._taken.values())
        return self._taken[producer_id]

    def release(self, producer_id: int) -> None:
        """Let another producer have a lost one's server."""
        self._taken.pop(producer_id, None)
