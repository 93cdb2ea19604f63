"""Our end of a worker's socket: messages flow out and lines flow in, one JSON text a line, and neither ever blocks.

What a socket does not take at once waits here until the selector says that it is writable, so that a worker that does
not read holds up nobody. JSON escapes every line end, so that a line is a message.
"""

import socket

_READ_SIZE = 1 << 16


class ChannelClosedError(Exception):
    """The other end is closed: its process has ended."""


class Channel:
    """A stream socket, used by one thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._unsent = memoryview(b"")
        self._unread = b""  # the beginning of a line

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def is_sending(self) -> bool:
        """True while a part of a message waits for the other end to read."""
        return len(self._unsent) > 0

    def send(self, line: bytes) -> None:
        """Send `line`, which ends with its only line end. Raises: ChannelClosedError."""
        self._unsent = memoryview(bytes(self._unsent) + line)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now. Raises: ChannelClosedError."""
        try:
            while self.is_sending:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self) -> list[bytes]:
        """The lines that have arrived since the last call, maybe none. Raises: ChannelClosedError after the last."""
        try:
            data = self._socket.recv(_READ_SIZE)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("end of stream")
        *lines, self._unread = (self._unread + data).split(b"\n")
        return lines

    def close(self) -> None:
        """Close our end; the other one sees the end of the stream."""
        self._socket.close()
