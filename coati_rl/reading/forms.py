"""Define the six forms into which the rows of offline jobs are read, whatever system they were written for.

A prompt or a completion is either messages, which the model's chat template renders, or plain text, which is tokenised
as it is; a recorded trajectory has the ids of its tokens. `row_formats` and `recorded_rollouts` read rows into forms,
`offline_samples`, `reward_samples` and `value_samples` make samples of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Message = Mapping[str, Any]  # {"role": text, "content": text}; a template may read more: "tool_calls", "name"
Messages = tuple[Message, ...]
Content = Messages | str  # messages for the chat template, or plain text


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """Hold what a row gives to the chat template besides messages, and where the row is."""

    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of functions
    options: Mapping[str, Any] = field(default_factory=dict)  # variables by name, such as enable_thinking
    where: str = ""  # flag, file and row, for messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation(Rendered):
    """Hold a conversation with at least one turn of the assistant, for supervised fine-tuning."""

    messages: Messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Hold plain text: a document for continued pretraining, or a completion after its prompt."""

    text: str  # in the loss
    prompt: str = ""  # before it, not in the loss unless all tokens are
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair(Rendered):
    """Hold two completions of a prompt, one of which is preferred; all three are messages, or all are plain text."""

    prompt: Content  # may be empty where all three are plain text
    chosen: Content
    rejected: Content
    margin: float = 0.0  # by which the reward of the chosen one should be larger

    def __post_init__(self) -> None:
        _check_kinds(self.prompt, self.chosen, self.rejected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled(Rendered):
    """Hold a completion of a prompt and whether it is desirable; both are messages, or both are plain text."""

    prompt: Content
    completion: Content
    label: bool

    def __post_init__(self) -> None:
        _check_kinds(self.prompt, self.completion)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps(Rendered):
    """Hold the S steps of a solution and how right each is.

    Where a row is one text with a mark after each step, the prompt is empty and the first step begins with it.
    """

    prompt: Content  # messages: the chat template renders them, and asks for the assistant's turn
    steps: tuple[str, ...]  # S texts, in order
    labels: tuple[float, ...]  # S numbers from 0 (wrong) to 1 (right)

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.labels):
            raise ValueError(f"{self.where}: {len(self.steps)} steps have {len(self.labels)} labels")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recorded:
    """Hold a trajectory that a run sampled, by its token ids: P of the prompt, T after it, N of them in the loss."""

    prompt_ids: np.ndarray  # int32[P]; the same object in trajectories of equal prompts
    token_ids: np.ndarray  # int32[T]
    loss_mask: np.ndarray  # bool[T]
    rewards: np.ndarray  # float32[N], of each token in the loss
    last_turn: slice  # of T
    response: str  # its text, as the run's tokenizer decoded it
    where: str = ""


Form = Conversation | Text | Pair | Labelled | Steps | Recorded


def _check_kinds(*contents: Content) -> None:
    """Refuse messages beside plain text: the two are rendered in different ways."""
    if len({isinstance(content, str) for content in contents}) > 1:
        raise ValueError("prompt and completions must all be messages, or all be text")
