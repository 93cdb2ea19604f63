"""Hold the experts of a mixture that an engine chose for each token, so that trainers can choose the same.

Routes are an array [T tokens, D decoder layers, K experts of a token] of the narrowest unsigned integers. They belong
to input tokens: a token's experts computed its hidden state, which predicts the next token. Where they are not known
(the last token of a response passes no engine), and in layers without experts, they are the dtype's largest number.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def route_dtype(num_experts: int) -> np.dtype:
    """Return the narrowest dtype whose largest number names no expert."""
    return np.dtype(np.uint8 if num_experts < np.iinfo(np.uint8).max else np.uint16)


def unknown_routes(num_tokens: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return routes that are not known, of so many tokens; `shape`: (D, K)."""
    return np.full((num_tokens, *shape), np.iinfo(dtype).max, dtype=dtype)


def unknown_like(num_tokens: int, routes: np.ndarray) -> np.ndarray:
    """Return routes that are not known, of so many tokens of the same model."""
    return unknown_routes(num_tokens, routes.shape[1:], routes.dtype)


def is_known(routes: np.ndarray) -> np.ndarray:
    """Return bool[T, D]."""
    known: np.ndarray = routes[..., 0] != np.iinfo(routes.dtype).max
    return known


def first_known(first: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the routes of the first array where they are known, else of the other one, of the same tokens."""
    return np.where(is_known(first)[..., None], first, other)


def routes_of(num_tokens: int, passes: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return the routes of the first tokens, of the first pass that knows them; None if there are none.

    Args:
        num_tokens: of the sequence.
        passes: routes of its first tokens, in the order of the passes; each may have fewer tokens, or more.
    """
    given = [each for each in passes if each is not None]
    if not given:
        return None
    found = unknown_like(num_tokens, given[0])
    for each in given:
        part = each[:num_tokens]
        found[: len(part)] = first_known(found[: len(part)], part)
    return found


def routes_as_json(routes: np.ndarray) -> dict[str, Any]:
    """Return routes for a line of JSON: shape, dtype, and the bytes in base64."""
    little = np.ascontiguousarray(routes, routes.dtype.newbyteorder("<"))
    return {"shape": [*routes.shape], "dtype": routes.dtype.name, "base64": b64encode(little.tobytes()).decode()}


def routes_of_json(fields: Mapping[str, Any]) -> np.ndarray:
    """Return what `routes_as_json` was given. Raises: ValueError, KeyError or TypeError if it is not that."""
    dtype = np.dtype(fields["dtype"])
    if dtype not in (np.uint8, np.uint16):
        raise ValueError(f"routes of dtype {dtype}")
    data = np.frombuffer(b64decode(fields["base64"]), dtype.newbyteorder("<"))
    return data.astype(dtype).reshape(fields["shape"])
