"""A plain socket between rank 0 and each member of its group, which the kernel closes when either one dies.

In: the other end's last words, or its silence. Out: the reason why a transfer cannot succeed any more, while there is
still time. gloo does not wake a sender whose receiver dies in mid-transfer, and NCCL's kernels spin for ever; neither
can say who is missing or why. So members meet over their peers, and every wait of a transfer looks at them.

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
    """One end. Never blocks, except where a deadline is given."""

    def __init__(self, connection: socket.socket, *, peer: str) -> None:
        """`peer` names the other end in messages, such as "rank 2"."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._connection = connection
        self._unread = b""
        self._lines: list[dict[str, Any]] = []
        self._loss: str | None = None
        self._has_left = False  # in peace: what it had to send has been sent

    def fileno(self) -> int:
        """For poll."""
        return self._connection.fileno()

    def tell(self, message: dict[str, Any]) -> None:
        """Send a line; a peer that is gone is noticed elsewhere."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def listen(self) -> dict[str, Any] | None:
        """The next line, if one has arrived."""
        self.loss()
        return self._lines.pop(0) if self._lines else None

    def loss(self) -> str | None:
        """Why nothing more will come from the peer; None while it is there, and after it left in peace."""
        if self._loss is None and not self._has_left:
            try:
                self._read()
            except (OSError, ValueError) as error:
                self._loss = f"lost {self.peer}: {error}"
        return self._loss

    def close(self, reason: str | None) -> None:
        """Leave, with the reason if it is not in peace. The peer's transfer fails with it."""
        self.tell({"end": None if reason is None else reason[:_MAX_REASON]})
        self._connection.close()
        self._has_left = True

    def _read(self) -> None:
        while not self._has_left and self._loss is None:
            try:
                data = self._connection.recv(4096)
            except BlockingIOError:
                return
            if not data:
                self._loss = f"{self.peer} died"
            self._unread += data
            if len(self._unread) > _MAX_LINE_BYTES:
                raise ValueError("it sent a line without an end")
            *complete, self._unread = self._unread.split(b"\n")
            for line in complete:
                self._take(json.loads(line))

    def _take(self, message: Any) -> None:
        match message:
            case {"end": None}:
                self._has_left = True
            case {"end": reason}:
                self._loss = f"{self.peer} gave up: {reason}"
            case dict():
                self._lines.append(message)
            case _:
                raise ValueError(f"it sent {message!r}")


class PeerHub:
    """Rank 0's ends: waits for all members, then watches them."""

    def __init__(self, host: str, *, secret: str) -> None:
        """Listens on this address alone, at a port that the system chooses; who knows the secret is a member."""
        self._secret = secret
        self._listener = listen_on(host)
        self._listener.setblocking(False)
        self._peers: dict[int, PeerConnection] = {}  # by rank

    @property
    def port(self) -> int:
        """Return where members connect to."""
        return int(self._listener.getsockname()[1])

    def gather(self, world_size: int, *, deadline: Deadline) -> list[PeerConnection]:
        """Wait until ranks 1 to world_size - 1 are here. Raises: TransferTimeoutError naming the missing ones."""
        strangers: list[PeerConnection] = []
        while missing := set(range(1, world_size)) - self._peers.keys():
            names = ", ".join(str(rank) for rank in sorted(missing))
            what = f"rank 0 of {world_size}, joining: waiting for rank {names}"
            deadline.check(what)
            for loss in filter(None, (peer_connection.loss() for peer_connection in self._peers.values())):
                raise TransferError(f"{what}: {loss}")
            _wait_readable([self._listener, *strangers], deadline)
            with suppress(BlockingIOError):
                strangers.append(PeerConnection(self._listener.accept()[0], peer="a stranger"))
            strangers = [stranger for stranger in strangers if not self._admit(stranger, missing)]
        self._listener.close()
        return [self._peers[rank] for rank in sorted(self._peers)]

    def close(self, reason: str | None) -> None:
        """Tell everyone why, or that all is well, and hang up."""
        self._listener.close()
        for peer_connection in self._peers.values():
            peer_connection.close(reason)

    def _admit(self, stranger: PeerConnection, missing: set[int]) -> bool:
        """True when this connection has been dealt with: it is a member now, or was turned away."""
        match stranger.listen():
            case None if stranger.loss() is None:
                return False
            case {"rank": int(rank), "secret": str(said)} if rank in missing and self._is_secret(said):
                stranger.peer = f"rank {rank}"
                self._peers[rank] = stranger
            case _:  # what it said is not repeated: a secret may be in it
                stranger.close("turned away: no member of this group, or one that is here already")
        return True

    def _is_secret(self, said: str) -> bool:
        return compare_digest(said.encode(), self._secret.encode())


def join_hub(
    host: str, port: int, *, rank: int, secret: str, what: str, deadline: Deadline
) -> tuple[PeerConnection, Any]:
    """A member's end, and what the trainer said when all were there.

    Raises: TransferError if the trainer is gone, TransferTimeoutError if not all come in time.
    """
    try:
        connection = socket.create_connection((host, port), timeout=max(0.001, deadline.remaining_s()))
    except OSError as error:
        deadline.check(what)
        raise TransferError(f"{what}: cannot reach the trainer at {host}:{port}: {error}") from error
    peer_connection = PeerConnection(connection, peer="rank 0")
    peer_connection.tell({"rank": rank, "secret": secret})
    watched = deadline.watching(peer_connection.loss)
    try:
        while (message := peer_connection.listen()) is None:
            watched.check(f"{what}: waiting for the other ranks")
            _wait_readable([peer_connection], deadline)
        if "go" not in message:
            raise TransferError(f"{what}: the trainer said {message}")
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
    """A listening socket on this address alone; a bare TCPStore, for one, would listen on every one."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise TransferError(f"cannot listen on {host}: {error}") from error
    return listener
