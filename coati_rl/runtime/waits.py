"""Wait for the results of remote calls by a clock that nobody sets.

`ray.get` and `ray.wait` with a timeout go by the wall clock: they end late by as much as it is set back meanwhile (Ray
2.60: a wait of 1 s took 16 s when the clock was set back by 15). A future is waited for by the monotonic clock.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

_SLICE_S = 2.0  # time for which the process is stopped (Ctrl-Z) counts as this much at most


def result(reference: ray.ObjectRef[Any], *, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> Any:
    """Return the result of a remote call; `meanwhile` is called every two seconds until it is there.

    Raises: what the call raised, as `ray.get` does; GetTimeoutError if it is not there in time.
    """
    future = reference.future()
    left_s = timeout_s
    while not _is_done(future, min(left_s, _SLICE_S)):
        left_s -= _SLICE_S
        if left_s <= 0:
            raise GetTimeoutError(f"no result within {timeout_s:g} s")
        meanwhile()
    return future.result()


def ready(references: Sequence[ray.ObjectRef[Any]], *, timeout_s: float) -> list[ray.ObjectRef[Any]]:
    """Return those of some results that are there, or have failed, when all are or the time is over."""
    of = {reference.future(): reference for reference in references}
    done, _ = futures.wait(of, timeout_s)
    return [reference for future, reference in of.items() if future in done]


def as_ready(references: Sequence[ray.ObjectRef[Any]], *, timeout_s: float) -> Iterator[ray.ObjectRef[Any]]:
    """Yield each as soon as its result is there, or it has failed; when the time is over, those that are left."""
    waiting = {reference.future(): reference for reference in references}
    try:
        for future in futures.as_completed([*waiting], timeout_s):
            yield waiting.pop(future)
    except TimeoutError:
        yield from waiting.values()


def _is_done(future: futures.Future[Any], timeout_s: float) -> bool:
    return bool(futures.wait([future], timeout_s).done)
