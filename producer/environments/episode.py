"""Define what a user writes for a multi-turn task: an episode, which answers the policy's turns with observations.

An object is made for each episode. `reset` returns what the policy reads first, `step` what it reads after each of its
answers. All three methods may be sync or async: a sync one runs in a thread, or the whole episode in a process of its
own (--env-isolation process). Each has a time limit (--env-timeout).
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coati_rl.errors import CoatiError
from coati_rl.types import FinishReason, Purpose

Message = dict[str, Any]  # in OpenAI's form: role, content, tool_calls?, tool_call_id?, name?, reasoning_content?

# What the policy reads next: text that is appended as it is; chat messages, which the model's template renders; token
# ids; or nothing, after which the policy goes on with its own text.
Observation = str | Sequence[Message] | Sequence[int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeTask:
    """Hold what an episode is about: a row of the dataset, as JSON types."""

    uid: str  # of the prompt
    messages: tuple[Message, ...]  # of the prompt, system prompt included
    prompt: str  # the same, rendered by the chat template
    ground_truth: str  # empty if the rows have none
    columns: dict[str, Any]  # of the row, by name
    seed: int  # the same in the episodes of a prompt, so that they begin in the same state
    episode: int  # of the prompt, from 0
    purpose: Purpose  # "train" or "eval"
    # Of a turn, as the run's flags say: temperature (0 is greedy), top_p, top_k (None: all), min_p, max_new_tokens and
    # stop.
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """Hold one answer of the policy."""

    text: str  # decoded, without the token that ends the turn
    token_ids: tuple[int, ...]  # as sampled, with that token
    finish_reason: FinishReason  # "length": the token limit ended it
    turn: int  # of the episode, from 0
    messages: tuple[Message, ...]  # the conversation so far, this answer last


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Hold what an episode answers to an action."""

    observation: Observation = None  # what the policy reads next; not read if `done`
    reward: float | Mapping[str, float] = 0.0  # of this turn, or several by name; an episode's reward is their sum
    done: bool = False  # the episode is over
    info: dict[str, Any] = field(default_factory=dict)  # JSON types; for the record of the rollout
    sampling: Mapping[str, Any] | None = None  # of the next turn, by the same names, and its seed
    # Of the whole episode, as the last step says: what --filter-range looks at in place of the reward (from 1 on the
    # episode is correct); and numbers whose means are agent/NAME_mean in metrics.jsonl.
    filter_score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    # The answer as the chat template has to write it in the next context, where that is not {"role": "assistant",
    # "content": text}: with the tool_calls that were found in it.
    answer: Message | None = None


StepResult = Step | tuple[Any, ...]  # a tuple: (observation, reward, done, info), info may be left out


class Episode(Protocol):
    """Play one episode with the policy."""

    def reset(self, task: EpisodeTask) -> "Observation | Step | Awaitable[Observation | Step]":
        """Begin. Returns: None for the dataset's prompt as it is, or what the policy reads in its place.

        In a Step, its `observation` is that, and its `sampling` is of the first turn; the rest of it is not read.
        """

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """Answer the policy. Raises: anything, after which the episode's sample is invalid: masked, and counted."""

    # May be left out, as may `close`: truncated(self) -> the reward, or rewards by name, that is due as a limit of
    # turns or tokens has ended the episode.

    def close(self) -> Awaitable[None] | None:
        """Free what the episode holds; called once, also after a failure and at a time limit."""


class EpisodeFailure(CoatiError):
    """Report that an episode cannot go on, so that its sample must not be trained on; the message is its detail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeLimits:
    """Limit episodes; one that is ended by a limit of turns or tokens is an ordinary, truncated one."""

    max_turns: int  # answers of the policy
    max_tokens: int  # of the longest context, prompt included
    timeout_s: float  # for each call of reset, step and close
