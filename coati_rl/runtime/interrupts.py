"""Treat the signals that end a run alike: Ctrl-C, SIGTERM, a closed terminal (SIGHUP) and Ctrl-\\ (SIGQUIT)."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


def ending_signals() -> set[signal.Signals]:
    """List those that end a run; not SIGHUP where nohup has it ignored."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    return numbers - ({signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set())


def handle_first(numbers: set[signal.Signals], handler: Handler) -> None:
    """Call the handler on the first of these signals; further ones must not disturb the end (terminals repeat them)."""

    def first(number: int, frame: FrameType | None) -> None:
        for ignored in numbers:
            signal.signal(ignored, signal.SIG_IGN)
        handler(number, frame)

    for number in numbers:
        signal.signal(number, first)


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """End what goes on."""
    raise KeyboardInterrupt


@contextmanager
def noted_interrupts() -> Iterator[Callable[[], float | None]]:
    """Let the block come to an end of its own when a signal comes: it asks for it, and nothing in it is cut short.

    Yields: when the first signal came, seconds of the monotonic clock; None while there is none.
    """
    came_at: float | None = None

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal came_at
        came_at = time.monotonic()

    handlers = {number: signal.getsignal(number) for number in ending_signals()}
    handle_first(set(handlers), note)
    try:
        yield lambda: came_at
    finally:
        if came_at is None:
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Block SIGHUP and SIGQUIT while processes are started, which inherit that; here they come after the block.

    A terminal sends them to all processes of its foreground group; it is the driver that ends the others.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGQUIT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
