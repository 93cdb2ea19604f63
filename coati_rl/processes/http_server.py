"""Open a listening socket and configure uvicorn, for whatever serves an application on it."""

import ipaddress
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from coati_rl.errors import ConfigError

_BACKLOG = 1024  # connections that wait to be accepted
_GRACE_S = 2  # for replies at the end
_KEEP_ALIVE_S = 75


def listen(host: str = "127.0.0.1", port: int = 0, *, is_shared: bool = False) -> socket.socket:
    """Open a listening socket; port 0 picks a free one.

    Args:
        is_shared: another process of this user may have bound the port, as `join_port_held` does.
    Raises: OSError.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG, reuse_port=is_shared)


def listen_as_told(host: str, port: int, *, say: Callable[[str], None] | None = None, what: str = "") -> socket.socket:
    """Do the same for --host and --port; `say` warns if other machines can reach it. Raises: ConfigError.

    `what`: is sent, for the warning.
    """
    if not 0 <= port <= 65535:  # name lookup would take the lower 16 bits
        raise ConfigError(f"--port is {port}: cannot listen: give 1 to 65535, or 0 for a free one")
    try:
        listener = listen(host, port)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen: {error}; use another host or port (0 for a free port)"
        ) from error
    if say is not None and not is_loopback(str(listener.getsockname()[0])):
        say(
            f"warning: --host {host} is reachable from other machines without TLS: {what} are sent unencrypted; use a "
            "private network or a TLS proxy"
        )
    return listener


def is_loopback(host: str) -> bool:
    """Return True of an address, or name, that other machines cannot reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def url_of(listener: socket.socket) -> str:
    """Return the URL that a listening socket is reached at, without a path."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """Return uvicorn's settings: no signals, no logs of its own, no headers that a client could forge.

    `options` take the place of uvicorn's others: protocol, limits, seconds.
    """
    defaults = {
        "http": "h11",
        "lifespan": "off",
        "timeout_keep_alive": _KEEP_ALIVE_S,
        "timeout_graceful_shutdown": _GRACE_S,
    }
    return uvicorn.Config(
        app,
        loop="asyncio",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        **{**defaults, **options},
    )


class ReadyServer(uvicorn.Server):
    """Call back when the server is ready, and when its end begins."""

    def __init__(
        self, config: uvicorn.Config, *, on_ready: Callable[[], None], on_end: Callable[[], object] | None = None
    ) -> None:
        super().__init__(config)
        self._on_ready, self._on_end = on_ready, on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_end is not None:
            self._on_end()
        await super().shutdown(sockets)
