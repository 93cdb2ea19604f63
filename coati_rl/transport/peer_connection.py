"""Connect rank 0 to each member of its group by a TCP socket, which the kernel closes when either process dies.

It gives the reason why a transfer cannot succeed any more as soon as a peer dies or fails. gloo does not wake a sender
whose receiver dies in mid-transfer, and NCCL's kernels spin for ever; neither reports which rank is missing or why. So
members connect to rank 0 first, and every wait of a transfer checks these connections.

One JSON object per line: {"rank", "secret"} from a member, then {"go"} from rank 0, {"end"} from either.
"""

import json
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from hmac import compare_digest
from typing import Any

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline

_MAX_LINE_BYTES = 65536
_MAX_REASON = 2000  # characters


class PeerConnection:
    """Hold one end of a connection. Never blocks, except where a deadline is given."""

    def __init__(self, connection: socket.socket, *, peer: str) -> None:
        """Take a connected socket; `peer` names the other end in messages, such as "rank 2"."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._connection = connection
        self._unread = b""
        self._lines: list[dict[str, Any]] = []
        self._failure: str | None = None
        self._has_left = False  # without an error: it has sent all it had to send

    def fileno(self) -> int:
        """Return the socket's descriptor, for poll."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a line; that a peer is dead is noticed when reading."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, None if none has arrived."""
        self.failure()
        return self._lines.pop(0) if self._lines else None

    def failure(self) -> str | None:
        """Return why the peer is lost; None while it is connected, and after it left without an error."""
        if self._failure is None and not self._has_left:
            try:
                self._read()
            except (OSError, ValueError, RecursionError) as error:  # of a process that may be none of ours
                self._failure = f"lost {self.peer}: {error}"
        return self._failure

    def close(self, reason: str | None) -> None:
        """Disconnect; with a `reason`, the peer's transfer fails with it."""
        self.send({"end": None if reason is None else reason[:_MAX_REASON]})
        self._connection.close()
        self._has_left = True

    def _read(self) -> None:
        while not self._has_left and self._failure is None:
            try:
                data = self._connection.recv(4096)
            except BlockingIOError:
                return
            if not data:
                self._failure = f"{self.peer} died"
            self._unread += data
            if len(self._unread) > _MAX_LINE_BYTES:
                raise ValueError(f"it sent a line of more than {_MAX_LINE_BYTES} bytes")
            *complete, self._unread = self._unread.split(b"\n")
            for line in complete:
                self._take(json.loads(line))

    def _take(self, message: Any) -> None:
        match message:
            case {"end": None}:
                self._has_left = True
            case {"end": reason}:
                self._failure = f"{self.peer} gave up: {reason}"
            case dict():
                self._lines.append(message)
            case _:
                raise ValueError(f"it sent {message!r}")


class PeerHub:
    """Accept the members' connections on rank 0."""

    def __init__(self, host: str, *, secret: str) -> None:
        """Listen on this address alone, at a port that the system chooses; members authenticate with the secret."""
        self._secret = secret
        self._listener = listen_on(host)
        self._listener.setblocking(False)
        self._peers: dict[int, PeerConnection] = {}  # by rank

    @property
    def port(self) -> int:
        """Return the port that members connect to."""
        return int(self._listener.getsockname()[1])

    def gather(self, world_size: int, *, deadline: Deadline) -> list[PeerConnection]:
        """Wait until ranks 1 to world_size - 1 are connected. Raises: TransferTimeoutError naming the missing ones."""
        unidentified: list[PeerConnection] = []
        while missing := set(range(1, world_size)) - self._peers.keys():
            names = ", ".join(str(rank) for rank in sorted(missing))
            what = f"rank 0 of {world_size}, joining: waiting for rank {names}"
            deadline.check(what)
            for failure in filter(None, (peer_connection.failure() for peer_connection in self._peers.values())):
                raise TransferError(f"{what}: {failure}")
            _wait_readable([self._listener, *unidentified], deadline)
            with suppress(BlockingIOError):
                unidentified.append(PeerConnection(self._listener.accept()[0], peer="an unknown process"))
            unidentified = [connection for connection in unidentified if not self._admit(connection, missing)]
        self._listener.close()
        return [self._peers[rank] for rank in sorted(self._peers)]

    def close(self, reason: str | None) -> None:
        """Close all connections, with the reason if there is one."""
        self._listener.close()
        for peer_connection in self._peers.values():
            peer_connection.close(reason)

    def _admit(self, connection: PeerConnection, missing: set[int]) -> bool:
        """Return True when this connection has been decided: accepted as a member, or refused."""
        match connection.receive():
            case None if connection.failure() is None:
                return False
            case {"rank": int(rank), "secret": str(received)} if rank in missing and self._is_secret(received):
                connection.peer = f"rank {rank}"
                self._peers[rank] = connection
            case _:  # the message is not repeated: it may hold a secret
                connection.close("refused: not a member of this group, or one that is connected already")
        return True

    def _is_secret(self, received: str) -> bool:
        return compare_digest(received.encode(errors="replace"), self._secret.encode())


def join_hub(
    host: str, port: int, *, rank: int, secret: str, what: str, deadline: Deadline
) -> tuple[PeerConnection, Any]:
    """Connect a member. Returns: its connection, and the value that rank 0 sent when all members were connected.

    Raises: TransferError if the trainer is lost, TransferTimeoutError if not all members connect in time.
    """
    try:
        connection = socket.create_connection((host, port), timeout=max(0.001, deadline.remaining_s()))
    except OSError as error:
        deadline.check(what)
        raise TransferError(f"{what}: cannot reach the trainer at {host}:{port}: {error}") from error
    peer_connection = PeerConnection(connection, peer="rank 0")
    peer_connection.send({"rank": rank, "secret": secret})
    watched = deadline.watching(peer_connection.failure)
    try:
        while (message := peer_connection.receive()) is None:
            watched.check(f"{what}: waiting for the other ranks")
            _wait_readable([peer_connection], deadline)
        if "go" not in message:
            raise TransferError(f"{what}: the trainer sent {message}")
    except TransferError as error:
        peer_connection.close(str(error))
        raise
    return peer_connection, message["go"]


def _wait_readable(files: Sequence[socket.socket | PeerConnection], deadline: Deadline) -> None:
    poll = select.poll()  # select() fails on descriptors above 1023
    for file in files:
        poll.register(file, select.POLLIN)
    poll.poll(1000 * deadline.slice_s())


def listen_on(host: str) -> socket.socket:
    """Return a listening socket on this address alone; a bare TCPStore, for one, would listen on all addresses."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise TransferError(f"cannot listen on {host}: {error}") from error
    return listener
