"""Play one episode: the policy's answers from the engine, the environment's from the user's object, in turns.

What was said is recorded as tokens in a `ConversationTree`; who said what, and how long it took, in a record as JSON.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from coati_rl.config.sampling import temperature_problem
from coati_rl.errors import RolloutError
from coati_rl.types import CUTS, Completion
from producer.environments.chat import ChatTemplate
from producer.environments.environment import Generate
from producer.environments.episode import (
    Action,
    EpisodeFailure,
    EpisodeLimits,
    EpisodeTask,
    Message,
    Observation,
    Step,
)
from producer.environments.episode_host import EpisodeCalls
from producer.environments.recorder import ConversationTree
from producer.environments.returned_steps import rewards_of
from producer.environments.trajectories import AnswerNode

Ending = Literal["done", "turns", "tokens"]

_ENVIRONMENT = "environment"  # the role of text and tokens that are appended without a message


class EpisodePlayer:
    """Play an episode.

    Args:
        tree: that it is recorded in.
        template: of the model.
        limits: of the episode.
        generate: asks the engine.
        calls: of the user's object.
        may_renormalise: turns may be sampled with another top_p or top_k than the run's.
    """

    def __init__(
        self,
        tree: ConversationTree,
        template: ChatTemplate,
        limits: EpisodeLimits,
        *,
        generate: Generate,
        calls: EpisodeCalls,
        may_renormalise: bool = True,
    ) -> None:
        self._tree = tree
        self._template = template
        self._limits = limits
        self._generate = generate
        self._calls = calls
        self._may_renormalise = may_renormalise
        self._messages: list[Message] = []
        self.turns: list[dict[str, Any]] = []  # who said what, for the record
        self.filter_score: float | None = None  # of the episode, as the last step says
        self.metrics: dict[str, float] = {}  # as the last step says

    async def play(self, task: EpisodeTask, prompt_ids: Sequence[int]) -> Ending:
        """Reset the episode and take turns until it is over.

        Args:
            task: that it is about.
            prompt_ids: of its messages.
        Returns: what ended it. Raises: EpisodeFailure; RolloutError of the engine or the template.
        """
        node, sampling = await self._reset(task, prompt_ids)
        observation: Observation = None
        for turn in range(self._limits.max_turns):
            context = self._tree.extend(node, observation)
            num_tokens = len(context.token_ids)
            if turn > 0:
                self._note_observation(observation, num_tokens, None if context.is_fork else len(node.token_ids))
            if num_tokens >= self._limits.max_tokens:
                if turn > 0:
                    return await self._ended("tokens", node)
                raise EpisodeFailure(
                    f"its first context has {num_tokens} tokens, which leaves none of {self._limits.max_tokens} for an "
                    "answer; give it less, or a larger --max-episode-tokens"
                )
            begin = time.perf_counter()
            (completion,) = await self._generate(context.token_ids, episode=task.episode, sampling=sampling)
            if completion.finish_reason == "abort":
                raise RolloutError("the engine aborted an answer")
            self.turns.append({"role": "assistant", "tokens": len(completion.token_ids), "seconds": _since(begin)})
            message: Message = {"role": "assistant", "content": completion.text}
            try:
                step = await self._step(completion, turn, message)
                message = step.answer or message
            finally:  # it was sampled, also if the episode fails now
                temperature = float((sampling or {}).get("temperature", self._generate.temperature))
                node = self._tree.add(context, completion, temperature=temperature, message=message)
            for name, value in rewards_of(step).items():
                self._tree.add_reward(node, name, value)
            if step.done:
                return "done"
            observation, sampling = step.observation, self._sampling(step, task)
            self._messages += [message, *self._as_messages(observation)]
        return await self._ended("turns", node)

    async def _ended(self, ending: Ending, node: AnswerNode) -> Ending:
        """Record the rewards that are due as a limit has ended the episode."""
        for name, value in (await self._calls.truncated()).items():
            self._tree.add_reward(node, name, value)
        return ending

    async def _reset(self, task: EpisodeTask, prompt_ids: Sequence[int]) -> tuple[AnswerNode, Mapping[str, Any] | None]:
        """Return the node of the episode's own prompt, or the dataset's, and the sampling of the first turn."""
        begin = time.perf_counter()
        start = await self._calls.reset(task)
        observation = start.observation
        seconds, token_ids = _since(begin), prompt_ids
        messages: Sequence[Message] = task.messages
        if isinstance(observation, str):
            token_ids, messages = self._template.encode_prompt(observation), ()
        elif observation is not None:
            items: list[Any] = list(observation)
            is_chat = isinstance(items[0], Mapping)
            token_ids, messages = (self._template.prompt(items), items) if is_chat else (items, ())
        self._messages += task.messages if observation is None else self._as_messages(observation)
        self.turns.append({"role": "prompt", "tokens": len(token_ids), "environment_seconds": seconds})
        return self._tree.start(token_ids, messages), self._sampling(start, task)

    async def _step(self, completion: Completion, turn: int, message: Message) -> Step:
        """Give an answer to the episode."""
        action = Action(
            text=completion.text,
            token_ids=tuple(completion.token_ids.tolist()),
            finish_reason=completion.finish_reason,
            turn=turn,
            messages=(*self._messages, message),
        )
        begin = time.perf_counter()
        step = await self._calls.step(action)
        self.turns[-1]["environment_seconds"] = _since(begin)
        if step.info:
            self.turns[-1]["info"] = step.info
        self.filter_score, self.metrics = step.filter_score, dict(step.metrics)
        return step

    def _sampling(self, step: Step, task: EpisodeTask) -> Mapping[str, Any] | None:
        """Return the sampling of the next turn. Raises: EpisodeFailure if its tokens could not be trained."""
        sampling = step.sampling or {}
        temperature = sampling.get("temperature")
        if task.purpose == "train" and temperature == 0:
            raise EpisodeFailure("sampling temperature 0 of a training turn: greedy tokens are not trained")
        if isinstance(temperature, int | float) and (problem := temperature_problem(temperature)):
            raise EpisodeFailure(f"sampling temperature {temperature:g} of a turn {problem}")
        own = self._generate.sampling
        others = [name for name in CUTS if name in sampling and sampling[name] != getattr(own, name)]
        if others and not self._may_renormalise:
            raise EpisodeFailure(
                f"sampling {others[0]} of a training turn: the engine's log-probabilities would be of another part of "
                f"the vocabulary than the run's ({getattr(own, others[0])}); train with --old-logprobs trainer, or "
                "leave it out"
            )
        return step.sampling

    def _note_observation(self, observation: Observation, num_tokens: int, num_before: int | None) -> None:
        """Record who answered; `num_before` are the tokens of the context before, None if it is rendered anew."""
        roles = dict.fromkeys(str(message["role"]) for message in self._as_messages(observation))
        noted = {"role": ", ".join(roles) or _ENVIRONMENT, "tokens": num_tokens - (num_before or 0)}
        self.turns.append(noted | ({"is_fork": True} if num_before is None else {}))

    def _as_messages(self, observation: Observation) -> list[Message]:
        """Return an observation as messages, for the record and the next action."""
        if isinstance(observation, str):
            return [{"role": _ENVIRONMENT, "content": observation}]
        items: list[Any] = list(observation or ())
        if not items or isinstance(items[0], Mapping):
            return items
        return [{"role": _ENVIRONMENT, "content": self._template.decode(items)}]


def _since(begin: float) -> float:
    """Return the seconds since a time of `perf_counter`, to the microsecond."""
    return round(time.perf_counter() - begin, 6)
