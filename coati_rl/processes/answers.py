"""Encode what a call in another process returned or raised."""

import pickle
from collections.abc import Callable
from typing import Any

from coati_rl.errors import RunError


def encode_answer(has_returned: bool, answer: Any, *, dumps: Callable[[Any], Any]) -> bytes:
    """Return the pickled pair; a RunError with the type and text in place of what cannot be sent.

    Args:
        has_returned: False if `answer` is the exception that was raised.
        answer: of the call.
        dumps: of the pickler.
    """
    try:
        encoded = bytes(dumps((has_returned, answer)))
        if not has_returned:
            pickle.loads(encoded)  # an error whose class takes other arguments than its message cannot be made again
    except Exception as error:  # noqa: BLE001  of the answer's own class
        cause = error if has_returned else answer
        replaced = RunError(f"{type(cause).__name__}: {cause}")
        replaced.__notes__ = getattr(cause, "__notes__", [])  # such as where it was raised
        return bytes(dumps((False, replaced)))
    return encoded
