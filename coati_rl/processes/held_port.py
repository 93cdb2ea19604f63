"""Keep other programs from a port while a run starts, one of whose processes is to listen there."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from coati_rl.errors import ConfigError


@contextmanager
def held_port(host: str, port: int, *, flags: str, remedy: str) -> Iterator[None]:
    """Hold it by a socket that is bound and does not listen, until the block ends.

    So the system chooses the port for nobody, and only a socket of the same user that asks to share it (SO_REUSEPORT)
    can be bound there.

    Args:
        host: an address or a name of this machine.
        port: from 1.
        flags: where it comes from, for the message.
        remedy: what to do if it is taken, for the message.
    Raises: ConfigError if another program has the port, or the address is not this machine's.
    """
    with ExitStack() as sockets:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            first, second = (sockets.enter_context(socket.socket(family)) for _ in range(2))
            # The first is refused if the port is anybody's, but not by the remains of an earlier run's connections.
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.bind(address)
        except (OSError, UnicodeError) as error:  # UnicodeError: of a name that is none, such as a..b
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{flags}: cannot listen there: {reason}; {remedy}") from error
        # A listener that reuses addresses, as most do, would be let in beside the first, but not beside the second.
        for each in (first, second):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with suppress(OSError):  # such remains keep it out
            second.bind(address)
        yield
