"""Define the data exchanged between the services: prompts, leases, completions, trajectories, rollout groups.

G episodes per prompt (group size); L tokens of a trajectory, N of them in the loss; T tokens of an engine's answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
Verdict = Literal["ok", "wrong", "invalid"]
Purpose = Literal["train", "eval"]
Device = Literal["cpu", "cuda"]
RolloutDetail = Literal["full", "text"]

DEFAULT_TASK = "default"  # of rows that name none: the run's own reward, system prompt and sampling
MAX_REWARD = 1e9  # largest absolute value: the square of a larger one may overflow float32 gradients
CUTS = ("top_p", "top_k", "min_p")  # of SamplingParams: they leave tokens out, and engines renormalise over the rest


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Describe how tokens are sampled. `seed` is the request's; sample i of the request uses seed + i."""

    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int | None = None  # None means all tokens
    min_p: float = 0.0  # tokens of at least this share of the likeliest one's probability; 0 means all
    repetition_penalty: float = 1.0  # of tokens that came before; 1 in training, whose softmax has none
    max_new_tokens: int = 3584
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Hold one row of a dataset, rendered and tokenised."""

    uid: str  # unique in a run: dataset row and episode
    token_ids: tuple[int, ...]
    ground_truth: str
    purpose: Purpose = "train"
    task: str = DEFAULT_TASK  # whose reward and sampling settings apply
    eval_set: str = ""  # the evaluation set's name, for purpose "eval"
    text: str = ""  # the user's message, for display
    messages: tuple[dict[str, Any], ...] = ()  # the conversation that was rendered, system prompt included
    rendered: str = ""  # the text of the chat template, before tokenising
    columns: dict[str, Any] = field(default_factory=dict)  # the row, as JSON types, where its reward reads columns

    @property
    def problem(self) -> "Problem":
        """Return the part of the prompt that a scorer gets."""
        return Problem(
            uid=self.uid,
            ground_truth=self.ground_truth,
            messages=self.messages,
            prompt=self.rendered or self.text,
            task=self.task,
            columns=self.columns,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Hold what the responses to a prompt are scored against, as JSON types, for other processes and HTTP."""

    ground_truth: str  # an answer; for rewards that run code: JSON tests
    uid: str = ""  # of the prompt, for messages
    messages: tuple[dict[str, Any], ...] = ()  # the conversation before the response, {"role", "content"}
    prompt: str = ""  # the same, rendered by the chat template
    task: str = DEFAULT_TASK  # whose reward scores them
    columns: dict[str, Any] = field(default_factory=dict)  # of the row, by name; empty if the reward reads none


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Grant the right to roll out one prompt once; void when the prompt is issued again to another producer."""

    lease_id: int
    prompt: Prompt
    group_size: int  # episodes wanted (G)
    sampling: SamplingParams
    has_baseline: bool = False  # one more, number G, is greedy: its reward is what the others are compared with


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Hold one sample of a request. Token ids are those that the engine sampled; text is never retokenised."""

    token_ids: np.ndarray  # int32[T], includes the stop or EOS token when one was sampled
    logprobs: np.ndarray  # float32[T], nats, of the processed (temperature, top-k, top-p, min-p) distribution
    policy_versions: np.ndarray  # int32[T], policy version that sampled each token
    finish_reason: FinishReason
    text: str
    routes: np.ndarray | None = None  # uint[L, D, K], of context and response, see `coati_rl.routes`; None: not asked

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.policy_versions)}
        if len(lengths) != 1:
            raise ValueError(f"token_ids, logprobs and policy_versions differ in length: {sorted(lengths)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Locate one answer of the engine: the tokens [start, end) of a trajectory."""

    index: int  # in the episode, from 0
    start: int
    end: int
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenReward:
    """Hold a reward that an environment gives at a token."""

    position: int  # in the trajectory
    name: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPrefix:
    """Describe the first tokens of a trajectory, which another sequence shares, and which are not in its own loss."""

    num_tokens: int
    parent: int | None = None  # index in the group of an earlier trajectory of the episode; None: the group's prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """Hold one sequence of one episode: the context and the tokens sampled in it, over one or more turns.

    An episode whose context is rewritten has several: the later ones are forks, which share a prefix.
    """

    token_ids: np.ndarray  # int32[L]
    loss_mask: np.ndarray  # bool[L], True on the N sampled tokens that the loss counts
    logprobs: np.ndarray  # float32[N], nats, of these tokens in order, under the distribution that was sampled from
    policy_versions: np.ndarray  # int32[N], of the weights that sampled them
    temperature: np.ndarray  # float32[N], that they were sampled at; 0 is greedy
    episode: int  # of the group, from 0
    turns: tuple[Turn, ...]  # in order; those before the shared prefix's end are the parent's
    text: str  # of the last turn, decoded: what is scored
    prefix: SharedPrefix
    rewards: tuple[TokenReward, ...] = ()
    routes: np.ndarray | None = None  # uint[L, D, K], see `coati_rl.routes`; None: the engine returned none

    def __post_init__(self) -> None:
        num_in_loss = int(np.count_nonzero(self.loss_mask))
        lengths = [len(array) for array in (self.logprobs, self.policy_versions, self.temperature)]
        if len(self.token_ids) != len(self.loss_mask) or lengths != [num_in_loss] * 3:
            raise ValueError(
                f"{len(self.token_ids)} tokens, a loss_mask of {len(self.loss_mask)} with {num_in_loss} in the loss, "
                f"logprobs, policy_versions and temperature of {lengths}: need as many of each as are in the loss"
            )
        if not self.turns:
            raise ValueError("a trajectory has at least one turn")
        num_in_turns, end = 0, self.prefix.num_tokens
        for turn in self.turns:
            if not end <= turn.start <= turn.end <= len(self.token_ids):
                raise ValueError(
                    f"turn {turn.index} has the tokens {turn.start} to {turn.end}, and should begin at {end}"
                )
            num_in_turns += int(np.count_nonzero(self.loss_mask[turn.start : turn.end]))
            end = turn.end
        if num_in_turns != num_in_loss:
            raise ValueError("loss_mask is True on tokens of the shared prefix, or of no turn")
        if num_in_loss and self.loss_mask[0]:
            raise ValueError("loss_mask is True on the first token, which no token predicts")

    @property
    def num_loss_tokens(self) -> int:
        """Return the number of tokens that the loss counts; a shared prefix counts where it was sampled."""
        return len(self.logprobs)

    @property
    def finish_reason(self) -> FinishReason:
        """Return why the last turn ended."""
        return self.turns[-1].finish_reason


@dataclass(frozen=True, kw_only=True)  # without slots, which take twice as long to pickle
class Score:
    """Hold a reward function's result for one episode, from the text of its last turn."""

    reward: float  # used by the loss; undefined when the verdict is "invalid"
    answer_correct: bool
    format_valid: bool
    verdict: Verdict  # "invalid": the scorer could not decide; masked out of training and counted, never a zero
    detail: str = ""  # one line, for display
    breakdown: dict[str, float] = field(default_factory=dict)  # reward by name, before weights; empty if there is one
    filter_score: float | None = None  # used by --filter-range, clamped to [0, 1]; None: the reward


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Hold what is kept of the greedy answer to a group's prompt, which is none of its samples."""

    score: Score
    num_tokens: int  # sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """Hold the G scored episodes of one prompt."""

    lease_id: int
    producer_id: int
    prompt: Prompt
    # The lease's: producers do not send it back, the coordinator sets it. Each token's own is in its trajectory.
    temperature: float
    trajectories: Sequence[Trajectory]  # G or more, by episode; a parent comes before its forks
    scores: tuple[Score, ...]  # G, one of each episode
    records: tuple[dict[str, Any], ...] = ()  # G, of the turns of each episode, as JSON; none of single answers
    baseline: Baseline | None = None  # None: the lease asked for none
    cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # what follows from it

    def __post_init__(self) -> None:
        episodes, count = [trajectory.episode for trajectory in self.trajectories], len(self.scores)
        if not count or sorted(set(episodes)) != [*range(count)] or episodes != sorted(episodes):
            need = f"{count} scores: need trajectories of episode 0, 1, ... in order, a score of each, at least 1"
            raise ValueError(f"trajectories of the episodes {episodes}, {need}")
        if self.records and len(self.records) != count:
            raise ValueError(f"{len(self.records)} records and {count} scores: need one of each episode")
        prompt_ids = np.array(self.prompt.token_ids, dtype=np.int32)
        for index in range(len(self.trajectories)):
            self._check_prefix(index, prompt_ids)

    def _check_prefix(self, index: int, prompt_ids: np.ndarray) -> None:
        """Check that a fork's shared prefix is that of its parent, so that no token is in the loss twice."""
        trajectory, parent_ids = self.trajectories[index], prompt_ids
        prefix = trajectory.prefix
        if prefix.parent is not None:
            if not 0 <= prefix.parent < index or self.trajectories[prefix.parent].episode != trajectory.episode:
                raise ValueError(
                    f"trajectory {index} is a fork of {prefix.parent}, which is not an earlier one of its episode"
                )
            parent_ids = self.trajectories[prefix.parent].token_ids
        shared = parent_ids[: prefix.num_tokens]
        if len(shared) != prefix.num_tokens or (trajectory.token_ids[: prefix.num_tokens] != shared).any():
            raise ValueError(f"the first {prefix.num_tokens} tokens of trajectory {index} are not those of its parent")

    @property
    def policy_versions(self) -> np.ndarray:
        """Return int32, the policy version that sampled each token in the loss, over all trajectories."""
        return np.concatenate([each.policy_versions for each in self.trajectories])

    @property
    def oldest_version(self) -> int:
        """Return the oldest policy version that sampled a token of the group."""
        versions = self.policy_versions
        return int(versions.min()) if len(versions) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """Request `num_samples` responses to one prompt from an engine."""

    request_id: str
    token_ids: tuple[int, ...]
    num_samples: int
    sampling: SamplingParams
    json_schema: str | None = None  # JSON text that samples are constrained to; only vLLM can
    lora: str | None = None  # the engine's name of an adapter that it was made with; only vLLM has them
    min_policy_version: int = -1  # for the first token; the engine waits for its commit
    episode_id: str | None = None  # of an open episode, whose turns are requests; None: an episode of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunk:
    """Hold t new tokens of one sample of a request; the chunks of a sample, in order, make up its completion."""

    request_id: str
    index: int  # of the sample in its request
    token_ids: np.ndarray  # int32[t]
    logprobs: np.ndarray  # float32[t], nats, as in Completion
    policy_versions: np.ndarray  # int32[t]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitResult:
    """Hold a producer's result of a commit."""

    seconds: float  # until the new weights served; if the commit was in flight, generation paused for all of it
    probe_logprobs: np.ndarray  # float32[T - 1], of a probe's tokens after the first; empty without a probe
    identities: tuple[str, ...] = ()  # of the weights that serve, as the engine's ranks have them
    probe_routes: np.ndarray | None = None  # uint[T, D, K], with which it computed these; see `coati_rl.routes`


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """Hold an engine's answer to one request: its completions in sample order ("abort": cut off), or an error."""

    request_id: str
    completions: tuple[Completion, ...] = field(default=())
    error: str | None = None
    is_too_long: bool = False  # the error is that the context leaves no token for an answer
