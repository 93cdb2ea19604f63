"""Detect stop strings: a response ends with the token whose text completes one of them.

In: the token ids so far. Out: whether to stop, and the text up to and including the stop string.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]  # token ids to text, special tokens left out


def ends_with_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> bool:
    """Return True if the last token completed a stop string; to be called after every token.

    Only a window of tokens is decoded: a token has at least one byte of text, except special tokens, of which the
    window allows a few.
    """
    if not stop:
        return False
    window = max(len(text.encode()) for text in stop) + 8
    tail = decode(token_ids[-window:])
    return any(text in tail for text in stop)


def final_text(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> str:
    """Return the response's text, cut after the first stop string, if there is one."""
    text = decode(token_ids)
    ends = [text.index(mark) + len(mark) for mark in stop if mark in text]
    return text[: min(ends)] if ends else text
