"""Define what a reward model says of one response, and the interface of whatever owns a model."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedConversation:
    """Hold what is scored: messages and the response to them, or texts where there are no messages."""

    messages: tuple[dict[str, Any], ...]  # before the response
    response: str
    prompt: str = ""  # the text before the response, used without messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Hold a reward model's number for one response, or why there is none."""

    reward: float = 0.0
    problem: str = ""  # empty: `reward` is what the model says


class ModelClient(Protocol):
    """Score conversations by a reward model, in this process or another."""

    def submit(self, conversations: Sequence[JudgedConversation]) -> "Future[list[Judgement]]":
        """Score in the background. Returns: a future of one judgement each, in order, which does not fail."""

    def close(self) -> None:
        """Stop scoring; requests that wait are answered with a problem."""
