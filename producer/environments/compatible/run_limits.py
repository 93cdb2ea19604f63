"""Hold what the agents of other systems are given of a run: its tokenizer, and the limits of an episode."""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimits:
    """Hold them as JSON types, since episodes may be made in other processes."""

    model: str  # directory of the tokenizer
    chat_template: str | None  # of --chat-template
    max_turns: int
    max_tokens: int  # of the longest context
    needs_chat_template: bool = True  # False: prompts are text (--input-template)
    template_date: str | None = None  # that the template writes as today's
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables of the template, by name

    def tokenizer(self) -> Any:
        """Return the run's tokenizer, loaded once in a process."""
        variables = json.dumps(self.chat_template_kwargs, sort_keys=True)
        return _tokenizer(self.model, self.chat_template, self.template_date, variables, self.needs_chat_template)


@functools.cache
def _tokenizer(
    model: str, chat_template: str | None, template_date: str | None, variables: str, needs_chat_template: bool
) -> Any:
    from coati_rl.preflight.resources import load_tokenizer  # takes its time, and most episodes need none

    return load_tokenizer(
        Path(model),
        chat_template=chat_template,
        template_date=template_date,
        variables=json.loads(variables),
        needs_chat_template=needs_chat_template,
    )
