"""Define what passes between the services: prompts out to producers, rollout groups back. All frozen, all plain data.

P prompts, G samples per prompt (group size), T tokens. Arrays are NumPy, so that they cross Ray without a copy.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
Verdict = Literal["ok", "wrong", "invalid"]
Purpose = Literal["train", "eval"]
Device = Literal["cpu", "cuda"]
RolloutDetail = Literal["full", "text"]

MAX_REWARD = 1e9  # a larger one, of either sign, is a mistake: its square overflows where gradients are float32


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Describe how tokens are drawn. `seed` is the request's; sample i of the request uses seed + i."""

    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int | None = None  # None means all tokens
    max_new_tokens: int = 3584
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a dataset, rendered and tokenised."""

    uid: str  # unique in a run: dataset row and episode
    token_ids: tuple[int, ...]
    ground_truth: str
    purpose: Purpose = "train"
    task: str = "train"  # the evaluation task's name, for purpose "eval"
    text: str = ""  # the user's message, for people
    messages: tuple[dict[str, Any], ...] = ()  # the conversation that was rendered, system prompt included
    rendered: str = ""  # what the chat template made of it, before tokenising

    @property
    def problem(self) -> "Problem":
        """Return what a scorer gets to see of the prompt."""
        return Problem(
            uid=self.uid, ground_truth=self.ground_truth, messages=self.messages, prompt=self.rendered or self.text
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Describe what the responses to a prompt are scored against. All of it is JSON: it crosses processes and HTTP."""

    ground_truth: str  # an answer; for rewards that run code: JSON tests
    uid: str = ""  # of the prompt, for messages
    messages: tuple[dict[str, Any], ...] = ()  # the conversation before the response, {"role", "content"}
    prompt: str = ""  # the same, rendered by the chat template


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right to roll out one prompt once; void when the prompt is issued again to another producer."""

    lease_id: int
    prompt: Prompt
    group_size: int  # samples wanted (G)
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled response. Token ids are the engine's own; nothing is ever retokenised."""

    token_ids: np.ndarray  # int32[T], includes the stop or EOS token when one was sampled
    logprobs: np.ndarray  # float32[T], nats, of the processed (temperature, top-k, top-p) distribution
    policy_versions: np.ndarray  # int32[T], version of the weights that sampled each token
    finish_reason: FinishReason
    text: str

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.policy_versions)}
        if len(lengths) != 1:
            raise ValueError(f"token_ids, logprobs and policy_versions differ in length: {sorted(lengths)}")

    @property
    def is_truncated(self) -> bool:
        """True when the token limit ended the response."""
        return self.finish_reason == "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Describe what a reward function says of one response."""

    reward: float  # what the loss sees; without meaning when the verdict is "invalid"
    answer_correct: bool
    format_valid: bool
    verdict: Verdict  # "invalid": the scorer could not decide; masked out of training and counted, never a zero
    detail: str = ""  # one line for people
    breakdown: dict[str, float] = field(default_factory=dict)  # reward by name, before weights; empty if there is one
    filter_score: float | None = None  # what --filter-range looks at, held to [0, 1]; None: the reward


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """The G scored samples of one prompt: the unit that producers hand to the coordinator, by value."""

    lease_id: int
    producer_id: int
    prompt: Prompt
    temperature: float
    completions: tuple[Completion, ...]  # G
    scores: tuple[Score, ...]  # G

    def __post_init__(self) -> None:
        if len(self.completions) != len(self.scores) or not self.completions:
            raise ValueError(
                f"{len(self.completions)} completions, {len(self.scores)} scores: need as many, at least 1"
            )

    @property
    def oldest_version(self) -> int:
        """Version of the oldest weights that sampled a token of the group."""
        return min((int(c.policy_versions.min()) for c in self.completions if len(c.policy_versions)), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """Describe what an engine is asked for: `num_samples` responses to one prompt."""

    request_id: str
    token_ids: tuple[int, ...]
    num_samples: int
    sampling: SamplingParams
    min_policy_version: int = -1  # of the weights that sample the first token; the engine waits for their commit
    episode_id: str | None = None  # of an open episode, whose turns are requests; None: an episode of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunk:
    """Describe t new tokens of one sample of a request; the chunks of a sample, in order, make up its completion."""

    request_id: str
    index: int  # of the sample in its request
    token_ids: np.ndarray  # int32[t]
    logprobs: np.ndarray  # float32[t], nats, as in Completion
    policy_versions: np.ndarray  # int32[t]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitResult:
    """Describe what a producer says of a commit."""

    seconds: float  # until the new weights served; all of it a pause of generation if the commit was in flight
    probe_logprobs: np.ndarray  # float32[T - 1], of a probe's tokens after the first; empty if none was asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """An engine's answer to one request: all its completions in sample order, or the error that prevented them.

    Of an aborted request, samples that had not ended have the finish reason "abort" and the tokens sampled so far.
    """

    request_id: str
    completions: tuple[Completion, ...] = field(default=())
    error: str | None = None
