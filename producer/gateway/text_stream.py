"""Turn the tokens of a sample into text as they are sampled, up to a stop string.

In: token ids. Out: pieces of text that add up to the answer: no piece ends inside a character, and none holds a part of
a stop string.
"""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what the bytes of an unfinished character decode to


class TextStream:
    """Decode the tokens of one sample.

    Args:
        decode: returns the text of token ids, special tokens left out.
        stop: texts before which the answer ends.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = stop
        self._ids: list[int] = []
        self._begin = 0  # of the tokens that are decoded again, as the text of a token depends on those before it
        self._num_decoded = 0  # tokens whose text is in `_decoded`
        self._decoded = ""
        self._num_sent = 0  # characters
        self._is_stopped = False

    @property
    def text(self) -> str:
        """Return the text that was given out so far."""
        return self._decoded[: self._num_sent]

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns: the text that is certain now, which may be none."""
        self._ids += token_ids
        before = self._decode(self._ids[self._begin : self._num_decoded])
        now = self._decode(self._ids[self._begin :])
        if len(now) > len(before) and not now.endswith(_INCOMPLETE):
            self._take(now[len(before) :])
        return self._give(self._certain_length())

    def finish(self, token_ids: Sequence[int]) -> str:
        """Add what is missing of all tokens of the sample. Returns: the rest of the text."""
        self._ids += token_ids[len(self._ids) :]
        before = self._decode(self._ids[self._begin : self._num_decoded])
        self._take(self._decode(self._ids[self._begin :])[len(before) :])
        return self._give(len(self._decoded))

    def _take(self, text: str) -> None:
        if not self._is_stopped:
            searched_from = max(0, len(self._decoded) - max((len(mark) for mark in self._stop), default=0))
            self._decoded += text
            ends = [place for mark in self._stop if (place := self._decoded.find(mark, searched_from)) >= 0]
            if ends:
                self._decoded, self._is_stopped = self._decoded[: min(ends)], True
        self._begin, self._num_decoded = self._num_decoded, len(self._ids)

    def _certain_length(self) -> int:
        """Return how much of the text cannot be the beginning of a stop string."""
        if self._is_stopped:
            return len(self._decoded)
        longest = max((len(mark) for mark in self._stop), default=1)
        for length in range(min(longest - 1, len(self._decoded)), 0, -1):
            if any(mark.startswith(self._decoded[-length:]) for mark in self._stop):
                return len(self._decoded) - length
        return len(self._decoded)

    def _give(self, length: int) -> str:
        piece = self._decoded[self._num_sent : length]
        self._num_sent = max(self._num_sent, length)
        return piece
