"""Say again and again what a command does, while it is in a call that says nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 30.0  # between lines where nothing else is shown


@contextmanager
def repeated(call: Callable[[], None], *, every_s: float) -> Iterator[None]:
    """Call a function in a thread of its own every `every_s` seconds, until the block ends."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            call()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def slow_phase(text: str, say: Callable[[str], None], *, every_s: float = EVERY_S) -> Iterator[None]:
    """Say `text` with the seconds so far every `every_s` seconds of the block; nothing if it is over before."""
    begin = time.monotonic()
    with repeated(lambda: say(f"{text} ({time.monotonic() - begin:.0f} s so far)"), every_s=every_s):
        yield
