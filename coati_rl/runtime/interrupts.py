"""Treat the signals that end a run alike: Ctrl-C, SIGTERM, a closed terminal (SIGHUP) and Ctrl-\\ (SIGQUIT)."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


def ending_signals() -> set[signal.Signals]:
    """Those that end a run; not SIGHUP where nohup has it ignored."""
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
def noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Let the block come to an end of its own when a signal comes: it asks for it, and nothing in it is cut short.

    Raises: KeyboardInterrupt after the block, if there was a signal and no error.
    """
    came = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True

    handlers = {number: signal.getsignal(number) for number in ending_signals()}
    handle_first(set(handlers), note)
    try:
        yield lambda: came
    finally:
        if not came:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt
