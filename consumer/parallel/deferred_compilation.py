"""Put off what packages compile when they are imported: loading torch's compiler takes a second and a half."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deferred_compilation() -> Iterator[None]:
    """Have functions that are given to `torch.compile` in this block compiled when they are first called."""
    compile_now = torch.compile

    def compile_later(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
        if function is None:
            return functools.partial(compile_later, **settings)
        compiled: Callable[[], Any] = functools.cache(lambda: compile_now(function, **settings))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now
