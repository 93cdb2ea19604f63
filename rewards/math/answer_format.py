"""Check the format of a response by a rule: which tags occur, how often and in which order.

Text before, between and after the tags is not judged.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Tag:
    """A text that occurs exactly `num_occurrences` times."""

    text: str
    num_occurrences: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """Tags, in the order in which they occur: all of a tag before the first of the next."""

    tags: tuple[Tag, ...]
    description: str  # completes "not ..." for people

    def is_valid(self, response: str) -> bool:
        """Tell whether `response` has these tags, no more and no fewer, in this order. Linear in its length."""
        found = re.findall("|".join(re.escape(tag.text) for tag in self.tags), response)
        return found == [tag.text for tag in self.tags for _ in range(tag.num_occurrences)]


THINK_ANSWER_TAGS = AnswerFormat(
    tags=(Tag(text="<think>"), Tag(text="</think>"), Tag(text="<answer>"), Tag(text="</answer>")),
    description="one <think></think> and then one <answer></answer>",
)
