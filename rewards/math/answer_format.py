"""Check the format of a response: which tags occur, how often and in which order.

Text before, between and after the tags is not checked.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Tag:
    """Require a text to occur exactly `num_occurrences` times."""

    text: str
    num_occurrences: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """Require tags in order: all occurrences of a tag come before the first of the next."""

    tags: tuple[Tag, ...]
    description: str  # completes "not ..." in messages

    def is_valid(self, response: str) -> bool:
        """Return True if `response` has exactly these tags in this order. Linear in its length."""
        found = re.findall("|".join(re.escape(tag.text) for tag in self.tags), response)
        return found == [tag.text for tag in self.tags for _ in range(tag.num_occurrences)]


THINK_ANSWER_TAGS = AnswerFormat(
    tags=(Tag(text="<think>"), Tag(text="</think>"), Tag(text="<answer>"), Tag(text="</answer>")),
    description="one <think></think> and then one <answer></answer>",
)
