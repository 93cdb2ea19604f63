"""Call producers that have joined over HTTPS as if each were an actor of Ray: the join server holds them all."""

from typing import Any

import ray

from coati_rl.errors import PeerLostError

JOIN_SERVER = "join-server"  # name of its actor


class JoinedHandle:
    """Stand for the handle of a producer's actor: `handle.METHOD.remote(...)` calls the join server."""

    def __init__(self, server: Any, producer_id: int) -> None:
        """Take the join server's actor."""
        self._server, self._producer_id = server, producer_id

    def __getattr__(self, method: str) -> "_Method":
        return _Method(self._server, self._producer_id, method)


class _Method:
    def __init__(self, server: Any, producer_id: int, method: str) -> None:
        self._server, self._producer_id, self._method = server, producer_id, method

    def remote(self, *arguments: Any) -> Any:
        """Make the call. Returns: a reference of its result."""
        return self._server.call.remote(self._producer_id, self._method, arguments)


def producer_handle(name: str, namespace: str) -> Any:
    """Return the handle of a producer, "producer-3", by its actor or the join server. Raises: PeerLostError."""
    for actor in (name, JOIN_SERVER):
        try:
            handle = ray.get_actor(actor, namespace=namespace)
        except ValueError:  # raised by Ray if there is no such actor
            continue
        return handle if actor == name else JoinedHandle(handle, int(name.removeprefix("producer-")))
    raise PeerLostError(f"{name} has ended")


def end_producer(handle: Any) -> None:
    """Kill a producer's actor, or tell one that has joined over HTTPS to end."""
    if isinstance(handle, JoinedHandle):
        handle.end.remote()
    else:
        ray.kill(handle)
