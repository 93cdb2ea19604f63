"""Apply what an environment wants sampled otherwise in one turn to the sampling of the lease."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from coati_rl.errors import RolloutError
from coati_rl.types import SamplingParams


def with_step_sampling(sampling: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling of a turn.

    Args:
        sampling: of the lease, with the seed of this turn.
        changes: by name: temperature, top_p, top_k, min_p, max_new_tokens, stop, seed.
    Raises: RolloutError for another name, and for a value of another type or that is not finite. What is out of range
        is refused by the engine.
    """
    values: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in _KINDS:
            raise RolloutError(f"sampling {name!r} of a turn: there is no such field; use {', '.join(_KINDS)}")
        values[name] = _KINDS[name](name, value)
    return replace(sampling, **values)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RolloutError(f"sampling {name} {value!r} of a turn: use a finite number")
    return float(value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RolloutError(f"sampling {name} {value!r} of a turn: use a whole number")
    return value


def _top_k(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise RolloutError(f"sampling {name} {value!r} of a turn: use a text, or a list of texts")
    return tuple(texts)


_KINDS = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _top_k,
    "min_p": _number,
    "max_new_tokens": _integer,
    "stop": _stop,
    "seed": _integer,
}
STEP_FIELDS = tuple(_KINDS)  # of `SamplingParams`, that a turn may set
