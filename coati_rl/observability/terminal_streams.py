"""Tell which streams are terminals that a block can be drawn on, and print what is written to them above the block."""

import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, TextIO

_PLAIN_TERMS = ("", "dumb", "unknown")


def can_draw(stream: TextIO) -> bool:
    """Return True for a terminal that moves its cursor, unless the user asks for plain text by NO_COLOR or TERM."""
    with suppress(OSError, ValueError):
        return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in _PLAIN_TERMS
    return False


def encodable(text: str, encoding: str) -> str:
    """Return text with escapes in place of what an encoding lacks."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


class LinesAbove(io.TextIOBase):
    """Stand in for a stream to the terminal while the block is there: what is written is printed above it, by lines.

    A logging handler that was made meanwhile keeps it: after its end it writes to the stream.
    """

    def __init__(self, stream: TextIO, print_above: Callable[[str], None]) -> None:
        self.stream = stream
        self._print_above: Callable[[str], None] | None = print_above
        self._rest = ""  # of a line that has not ended
        self._lock = threading.Lock()

    @property
    def buffer(self) -> BinaryIO:
        """Return the stream's own; what is written there appears within the block until it is drawn again."""
        return self.stream.buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the stream's encoding."""
        return self.stream.encoding

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return True, as it is a terminal's."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """Return the stream's file; see `buffer`."""
        return self.stream.fileno()

    def write(self, text: str) -> int:
        """Print the lines that are complete."""
        lines: list[str] = []
        with self._lock:
            print_above = self._print_above
            if print_above is not None:
                *lines, self._rest = (self._rest + text).split("\n")
        if print_above is None:
            return self.stream.write(text)
        if lines:
            print_above("\n".join(map(_last_state, lines)))
        return len(text)

    def flush(self) -> None:
        """Flush the stream, once it is written to."""
        if self._print_above is None:
            self.stream.flush()

    def end(self) -> None:
        """Print what is left of a line, and let further text through."""
        with self._lock:
            rest, self._rest = self._rest, ""
            print_above, self._print_above = self._print_above, None
        if rest and print_above is not None:
            print_above(_last_state(rest))


def _last_state(line: str) -> str:
    """Return what a line shows that was written over by carriage returns, as progress bars do."""
    return line.rstrip("\r").rpartition("\r")[2]


@contextmanager
def printed_above(print_above: Callable[[str], None]) -> Iterator[None]:
    """Have what Python code writes to standard output and error printed above the block, where they are terminals."""
    replaced: dict[str, TextIO] = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    above = {name: LinesAbove(stream, print_above) for name, stream in replaced.items() if stream.isatty()}
    handlers: list[tuple[logging.StreamHandler[Any], TextIO]] = []
    for name, stand_in in above.items():
        setattr(sys, name, stand_in)
        for handler in _handlers():
            if handler.stream is stand_in.stream:
                handlers.append((handler, stand_in.stream))
                handler.setStream(stand_in)
    try:
        yield
    finally:
        for handler, stream in handlers:
            handler.setStream(stream)
        for name, stand_in in above.items():
            stand_in.end()
            setattr(sys, name, stand_in.stream)


def _handlers() -> Iterator[Any]:
    """Yield the handlers of all loggers that keep a stream; logging's last resort follows sys.stderr by itself."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):  # a PlaceHolder has none
            if isinstance(handler, logging.StreamHandler) and "stream" in vars(handler):
                yield handler
