"""Apply what an environment wants sampled otherwise in one turn, or a caller in one call, to the sampling of others."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from numbers import Integral, Real
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
    return _with(sampling, changes, STEP_FIELDS, " of a turn")


def with_call_sampling(sampling: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling of a call of the library, by the names above and repetition_penalty. Raises: RolloutError."""
    return _with(sampling, changes, _KINDS, "")


def _with(sampling: SamplingParams, changes: Mapping[str, Any], names: Collection[str], of: str) -> SamplingParams:
    values: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in names:
            raise RolloutError(f"sampling {name!r}{of}: there is no such field; use {', '.join(names)}")
        try:
            values[name] = _KINDS[name](value)
        except ValueError as error:
            raise RolloutError(f"sampling {name} {value!r}{of}: {error}") from error
    return replace(sampling, **values)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError("use a finite number")
    return float(value)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError("use a whole number")
    return int(value)


def _top_k(value: Any) -> int | None:
    return None if value is None else _integer(value)


def _stop(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("use a text, or a list of texts")
    return tuple(texts)


_KINDS = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _top_k,
    "min_p": _number,
    "max_new_tokens": _integer,
    "stop": _stop,
    "seed": _integer,
    "repetition_penalty": _number,
}
STEP_FIELDS = tuple(name for name in _KINDS if name != "repetition_penalty")  # that a turn may set
