"""Open a listening socket and configure uvicorn, for whatever serves an application on it."""

import socket
from typing import Any

import uvicorn

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
