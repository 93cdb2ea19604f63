"""Define a parsed answer, and assemble it from the calls that a format finds in the text.

All formats share the bounds here, so that no text costs more than time linear in its length times `MAX_CALLS`.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

MAX_CHARACTERS = 1 << 20  # of an answer that is parsed
MAX_CALLS = 64  # of an answer, calls that cannot be read included
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # OpenAI's rule, and dots
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID_LENGTH = 9  # letters and digits: Mistral's templates refuse others
_PLAIN_ID = re.compile(rf"[A-Za-z0-9]{{{_ID_LENGTH}}}")
_THOUGHT_END = "</think>"


class ToolCallError(ValueError):
    """Report that a call cannot be read; the message is for the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """Hold one call of a tool."""

    name: str
    arguments: dict[str, Any]  # JSON types, by parameter
    id: str  # unique in the answer; the same whenever the same answer is parsed


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAnswer:
    """Hold an answer's calls, and what it says besides."""

    content: str  # the text outside of calls; a call that cannot be read stays in it
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()  # one for each call that cannot be read, for the model

    def message(self) -> dict[str, Any]:
        """Return the assistant's message, as chat templates render it: arguments are objects, not encoded ones."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCall:
    """Hold a call as it is written."""

    name: str
    arguments: dict[str, Any]
    id: str = ""  # empty if the answer gives none


@dataclass(kw_only=True, slots=True)
class CallSpan:
    """Locate calls in a text: the characters [start, end)."""

    start: int
    end: int
    calls: list[WrittenCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class ToolCallFormat(Protocol):
    """Parse the answers of models that write calls in one format."""

    @property
    def name(self) -> str:
        """Return the name that --tool-format has for it."""

    def parse(self, text: str, *, turn: int = 0) -> ParsedAnswer:
        """Find the calls in an answer; no text raises.

        Args:
            text: the answer with the special tokens that are part of it, without the one that ends the turn.
            turn: of the episode; part of the ids of calls that the model gives none.
        """


class SpanFormat(ABC):
    """Implement `ToolCallFormat` for a format that can find its calls' places in a text."""

    name = ""

    def parse(self, text: str, *, turn: int = 0) -> ParsedAnswer:
        """See `ToolCallFormat.parse`. Calls within a thought, which may have begun in the prompt, are no calls."""
        if len(text) > MAX_CHARACTERS:
            return ParsedAnswer(
                content=text, errors=(f"an answer of {len(text)} characters is not searched for calls",)
            )
        spans = self.find(text, 0)
        end = text.find(_THOUGHT_END)
        if end >= 0 and not any(span.calls and span.start <= end < span.end for span in spans):
            spans = self.find(text, end + len(_THOUGHT_END))
        return _assembled(text, spans, turn=turn)

    @abstractmethod
    def find(self, text: str, start: int) -> list[CallSpan]:
        """Return the calls after `start`, in order, and at most `MAX_CALLS` of them."""


def checked_call(name: object, arguments: object, call_id: object = None) -> WrittenCall:
    """Return a call of these parts. Raises: ToolCallError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolCallError('"name" must be the name of a tool')
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ToolCallError(f"the arguments of {name} must be an object with a value for each parameter")
    return WrittenCall(name=name, arguments=arguments, id=call_id if isinstance(call_id, str) else "")


def _assembled(text: str, spans: Sequence[CallSpan], *, turn: int) -> ParsedAnswer:
    calls: list[ToolCall] = []
    errors: list[str] = []
    content: list[str] = []
    end = 0
    for span in spans:
        errors += span.errors
        if not span.calls:
            continue
        content.append(text[end : span.start])
        end = span.end
        for written in span.calls:
            taken = {call.id for call in calls}
            number = len(calls)
            is_usable = _ID.fullmatch(written.id) is not None and written.id not in taken
            call = ToolCall(name=written.name, arguments=written.arguments, id=written.id)
            calls.append(call if is_usable else _with_new_id(call, turn, number))
    rest = text[end:]
    content.append(rest if not calls or rest.strip() else "")
    return ParsedAnswer(content="".join(content), calls=tuple(calls), errors=tuple(errors))


def with_plain_ids(parsed: ParsedAnswer, *, turn: int) -> ParsedAnswer:
    """Return an answer in which ids of the model's that are not nine letters and digits are replaced."""
    calls = tuple(
        call if _PLAIN_ID.fullmatch(call.id) else _with_new_id(call, turn, number)
        for number, call in enumerate(parsed.calls)
    )
    return replace(parsed, calls=calls)


def _with_new_id(call: ToolCall, turn: int, number: int) -> ToolCall:
    text = f"{turn} {number} {call.name} {call.arguments!r}"
    return replace(call, id=hashlib.blake2b(text.encode(errors="replace")).hexdigest()[:_ID_LENGTH])
