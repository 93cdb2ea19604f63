"""Ask a chat template, before a run, which tool calls of an answer it writes: some refuse what a policy may sample.

Llama 3's write one call of an answer, Mistral's refuse ids that are not nine letters and digits.
"""

from dataclasses import dataclass
from typing import Any

from producer.environments.chat import ChatTemplate, TemplateError
from producer.environments.episode import Message

_NAME = "qzjtoolqzj"
_IDS = ("call00000", "call00001")  # that all templates take
_OWN_ID = "call-1"  # of another length, and with more than letters and digits


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRules:
    """Hold what a chat template takes."""

    takes_several: bool = True  # calls of one answer
    takes_ids: bool = True  # that are not nine letters and digits


def call_rules(template: ChatTemplate) -> CallRules:
    """Return what a template that writes one call takes besides."""
    return CallRules(takes_several=_writes(template, *_IDS), takes_ids=_writes(template, _OWN_ID))


def _writes(template: ChatTemplate, *ids: str) -> bool:
    """Return whether the template writes an answer with calls of these ids, and what they return."""
    calls: list[dict[str, Any]] = [
        {"id": call_id, "type": "function", "function": {"name": f"{_NAME}{number}", "arguments": {}}}
        for number, call_id in enumerate(ids)
    ]
    results: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "result"}
        for call in calls
    ]
    answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        text = template.render([{"role": "user", "content": "question"}, answer, *results])
    except TemplateError:
        return False
    return all(call["function"]["name"] in text for call in calls)
