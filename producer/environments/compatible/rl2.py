"""Play RL2's environments: `interact(messages)` with `reward_fn(messages, answer)`, and `env_step(state, ...)`.

Source: the README of github.com/ChenmienTan/RL2, section Tools, and its envs/searchr1.py.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from producer.environments.episode import Action, EpisodeFailure, EpisodeTask, Message, Step


class InteractEpisode:
    """Implement `Episode` with functions of a conversation.

    Args:
        interact: from the messages so far to those of the tools that the last one calls; none end the episode.
        reward_fn: from the whole conversation and the answer to the reward; None: another gives it (-rt).
    """

    def __init__(self, interact: Callable[..., Any], reward_fn: Callable[..., Any] | None) -> None:
        self._interact = interact
        self._reward_fn = reward_fn
        self._messages: list[Message] = []

    def reset(self, task: EpisodeTask) -> None:
        """Begin with the row's prompt."""
        self._answer = task.ground_truth

    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Return the tools' messages, or the reward."""
        self._messages = [dict(message) for message in action.messages]
        new = self._interact(list(self._messages))
        return _then(self._step, new) if inspect.isawaitable(new) else self._step(new)

    def truncated(self) -> Any:
        """Return the reward of the conversation up to the last answer."""
        return {} if self._reward_fn is None else self._reward_fn(self._messages, self._answer)

    def close(self) -> None:
        """Free nothing."""

    def _step(self, new: Any) -> Step:
        if not isinstance(new, list):
            raise EpisodeFailure(f"interact returned {type(new).__name__}; return a list of messages")
        return Step(observation=new, reward={}) if new else Step(reward=self.truncated(), done=True)


class EnvStepEpisode:
    """Implement `Episode` with a function of texts.

    Args:
        env_step: from the context, the answer and the ground truth to {"next_state", "done", "reward"}; the next state
            has to begin with the two.
    """

    def __init__(self, env_step: Callable[..., Any]) -> None:
        self._env_step = env_step

    def reset(self, task: EpisodeTask) -> None:
        """Begin with the row's prompt."""
        self._state, self._answer = task.prompt, task.ground_truth

    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Return what the next state has more than the context and the answer."""
        self._state += action.text
        returned = self._env_step(self._state.removesuffix(action.text), action.text, self._answer)
        return _then(self._step, returned) if inspect.isawaitable(returned) else self._step(returned)

    def close(self) -> None:
        """Free nothing."""

    def _step(self, returned: Any) -> Step:
        if not isinstance(returned, Mapping) or not {"next_state", "done", "reward"} <= returned.keys():
            raise EpisodeFailure("env_step has to return a dictionary with next_state, done and reward")
        reward, before, after = returned["reward"], self._state, returned["next_state"]
        if returned["done"]:
            return Step(reward=reward, done=True)
        if not isinstance(after, str) or not after.startswith(before):
            raise EpisodeFailure(
                "env_step rewrites the context: next_state does not begin with state + action, and the policy has not "
                "answered in that one; append to them, or return messages from an episode"
            )
        self._state = after
        return Step(observation=after.removeprefix(before), reward=reward)


async def _then(make_step: Callable[[Any], Step], awaitable: Awaitable[Any]) -> Step:
    return make_step(await awaitable)
