"""Let processes call objects of another one, over a socket in a private directory or, between machines, over TCP.

Each thread of a caller has a connection and each connection a thread, so that a call may wait. What is sent is pickled:
both ends hold a key, without which nothing is read.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.processes.answers import encode_answer

_MAX_SOCKET_PATH = 107  # bytes, of Linux
_RETRY_S = 0.1


class CallServer:
    """Answer calls on background threads."""

    def __init__(
        self, objects: Mapping[str, tuple[object, Sequence[str]]], directory: Path, *, address: str = ""
    ) -> None:
        """Listen in a directory that no other user may enter.

        Args:
            objects: by name, each with the names of the methods that may be called, from any thread.
            directory: for the socket.
            address: of this machine, to listen there instead, for callers of other machines that have the key.
        Raises: ConfigError if the directory's path is too long for a socket's.
        """
        self._methods = {
            (name, method): getattr(target, method) for name, (target, methods) in objects.items() for method in methods
        }
        path, key = str(directory / "calls"), secrets.token_bytes(32)
        if not address and (excess := len(os.fsencode(path)) - _MAX_SOCKET_PATH) > 0:
            raise ConfigError(
                f"TMPDIR {directory.parent}: {excess} characters too long for the path of a socket; set TMPDIR=/tmp"
            )
        self._listener = Listener((address, 0) if address else path, backlog=64)
        self._key = key
        where = self._listener.address  # a path, or an address and its port
        self.invitation = json.dumps({"address": where, "key": key.hex()})  # one line, for the callers alone
        self._is_closed = False
        threading.Thread(target=self._accept, name="calls", daemon=True).start()

    def close(self) -> None:
        """Take no further connections, and remove the socket."""
        self._is_closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
            except OSError:
                time.sleep(_RETRY_S)  # where this process may open no more files
            else:
                threading.Thread(target=self._answer, args=(connection,), name="call", daemon=True).start()

    def _answer(self, connection: "Connection[Any, Any]") -> None:
        # The caller has ended, or is none of ours. One that says nothing waits in a thread of its own.
        with connection, suppress(OSError, EOFError, AuthenticationError):
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            while True:
                name, method, arguments, options = connection.recv()
                try:
                    answer = (True, self._methods[name, method](*arguments, **options))
                except Exception as error:  # noqa: BLE001  raised where it was called
                    answer = (False, error)
                connection.send_bytes(encode_answer(*answer, dumps=ForkingPickler.dumps))


class Caller:
    """Call an object of a `CallServer` by its methods' names, from any thread."""

    def __init__(self, invitation: str, name: str) -> None:
        """Connect with the first call. `name`: of the object."""
        self._invited, self._name = json.loads(invitation), name
        self._own = threading.local()  # the connection of each thread

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a method, which raises what the object's raises; OSError or EOFError if its process has ended."""
        if method.startswith("__"):
            raise AttributeError(method)
        return lambda *arguments, **options: self._call(method, arguments, options)

    def _call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not hasattr(self._own, "connection"):
            address = self._invited["address"]
            self._own.connection = Client(
                address if isinstance(address, str) else tuple(address), authkey=bytes.fromhex(self._invited["key"])
            )
        self._own.connection.send((self._name, method, arguments, options))
        has_succeeded, answer = self._own.connection.recv()
        if not has_succeeded:
            raise answer
        return answer
