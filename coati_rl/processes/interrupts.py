"""Handle the signals that end a run alike: Ctrl-C, SIGTERM, a closed terminal (SIGHUP) and Ctrl-\\ (SIGQUIT)."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


def ending_signals() -> set[signal.Signals]:
    """Return the signals that end a run, without SIGHUP if it is ignored, as by nohup."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    return numbers - ({signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set())


def handle_first(numbers: set[signal.Signals], handler: Handler) -> None:
    """Call the handler on the first of these signals and ignore further ones, which terminals may send."""

    def first(number: int, frame: FrameType | None) -> None:
        for ignored in numbers:
            signal.signal(ignored, signal.SIG_IGN)
        handler(number, frame)

    for number in numbers:
        signal.signal(number, first)


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, as a signal handler."""
    raise KeyboardInterrupt


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Exit with code 0 on SIGTERM and with KeyboardInterrupt on SIGINT; later signals are ignored."""

    def end(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupt(number, frame)
        sys.exit(0)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handle_first(set(before), end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def recorded_interrupts() -> Iterator[Callable[[], float | None]]:
    """Record signals instead of raising, so that the block can poll for them and end in an orderly way.

    Yields: a function that returns the time of the first signal, seconds of the monotonic clock, or None.
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
def blocked_in_children() -> Iterator[None]:
    """Block SIGHUP and SIGQUIT while processes are started, which inherit the mask; here they arrive after the block.

    A terminal sends them to all processes of its foreground group; the driver alone has to handle them.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGQUIT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
