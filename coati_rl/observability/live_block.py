"""Keep a block of lines at the bottom of a terminal, below all that is printed meanwhile.

Consumes: lines to be printed above it. Waits for: a change, at most a second, as it shows time. Produces: frames,
at most four a second, by a thread of its own, so that a terminal that takes none (Ctrl-S) stops nothing else.

No state of the terminal is changed: the cursor is not hidden, there is no scroll region and no other screen. Between
frames the cursor is in the first column below the block, so that after the process was killed, the shell's prompt comes
there. A frame is one write that replaces line by line, so that nothing flickers.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console, RenderableType
from rich.text import Text

from coati_rl.observability.terminal_streams import encodable

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.25  # between frames, at least
_TIME_S = 1.0  # between frames, at most: the block shows time
_STOPPED_S = 5.0  # without a frame: the process was stopped (Ctrl-Z), and the shell has written below the block
_END_S = 5.0  # for the last frame; a terminal that takes none for longer is left alone
_USUAL_SIZE = (80, 24)  # where a terminal does not know its own


class LiveBlock:
    """Draw a block; `start`, `stop`, `refresh` and `print_above` may be called from any thread."""

    def __init__(self, console: Console, render: Callable[[int], RenderableType]) -> None:
        """Take the terminal, and what returns the block for a number of columns; it is called in another thread."""
        self._console = console
        self._render = render
        self._above: deque[str] = deque()  # lines to be printed
        self._shown: list[str] = []  # lines of the block on the screen
        self._width = 0  # of the terminal then
        self._is_lost = False  # the terminal was closed
        self._is_broken = False  # the block could not be rendered
        self._changed, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to draw."""
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Print what is left to be printed, and remove the block."""
        self._ended.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(_END_S)
            self._thread = None

    def refresh(self) -> None:
        """Draw the block again, soon."""
        self._changed.set()

    def print_above(self, text: str) -> None:
        """Print a line, or lines, above the block, soon."""
        self._above.append(text)
        self._changed.set()

    def draw(self, *, is_last: bool = False) -> None:
        """Write a frame, if anything has changed; called by one thread at a time."""
        width, height = self._size()
        above = [self._above.popleft() for _ in range(len(self._above))]
        block = [] if is_last else self._lines(width)[: max(height - 1, 1)]
        if self._is_lost or (block == self._shown and width == self._width and not above):
            return
        rows = sum(_rows(line, width) for line in self._shown) if width < self._width else len(self._shown)
        frame = f"\x1b[{rows}A\r" if rows else "\r"
        if above:
            frame += "\x1b[J" + "".join(f"{text}\n" for text in above)
        frame += "".join(f"{line}\x1b[K\n" for line in block) + "\x1b[J"
        try:
            self._console.file.write(encodable(frame, self._console.encoding))
            self._console.file.flush()
        except (OSError, ValueError):  # closed
            self._is_lost = True
        self._shown, self._width = block, width

    def _run(self) -> None:
        drawn_at = time.monotonic()
        while not self._ended.is_set():
            self._changed.wait(_TIME_S)
            self._changed.clear()
            if time.monotonic() - drawn_at > _STOPPED_S:
                self._shown = []
            self.draw()
            drawn_at = time.monotonic()
            self._ended.wait(_INTERVAL_S)
        self.draw(is_last=True)

    def _lines(self, width: int) -> list[str]:
        """Return the block's lines; none once it could not be rendered: what is printed above it must go on."""
        if self._is_broken:
            return []
        try:
            return self._rendered(width)
        except Exception:
            self._is_broken = True
            logger.exception("the terminal's block cannot be drawn; lines are printed as they come")
            return []

    def _rendered(self, width: int) -> list[str]:
        """Return the block's lines, with the terminal's codes for colours, each shorter than a row."""
        self._console.width = usable = max(width - 1, 1)
        with self._console.capture() as captured:
            self._console.print(self._render(usable), overflow="crop", crop=True)
        return captured.get().splitlines()

    def _size(self) -> tuple[int, int]:
        """Return columns and rows of the terminal, as they are now."""
        with suppress(OSError, ValueError):
            size = os.get_terminal_size(self._console.file.fileno())
            return (size.columns or _USUAL_SIZE[0], size.lines or _USUAL_SIZE[1])
        return self._console.size.width, self._console.size.height


def _rows(line: str, width: int) -> int:
    """Return the rows that a line of the block takes since the terminal has become narrower, and has broken it."""
    return max(1, -(-Text.from_ansi(line).cell_len // width))
