"""Play RL4LLM's environments: `_run_interaction_loop`, which asks the engine with texts, on a batch of one sample.

Source: the README of github.com/michaelnny/rl4llm, section Customization, and its rl4llm/core/base_env.py.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from producer.environments.compatible import stand_ins
from producer.environments.compatible.driven import Asking, Ended
from producer.environments.compatible.openrlhf import one_number, sampling_of
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.episode import EpisodeFailure, EpisodeTask


class _Engine:
    """Stand in for the inference client that the loop is given."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def generate(self, prompts: Any, sampling_params: Any = None, **other: Any) -> Any:
        """Sample an answer to a text, or to a list of one."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if len(texts) != 1 or not isinstance(texts[0], str) or other:
            raise EpisodeFailure("llm.generate takes one text and sampling_params; a batch is one sample here")
        action = self._asking.ask(texts[0], sampling_of(sampling_params)).result()
        output = {"text": action.text, "meta_info": {"finish_reason": {"type": action.finish_reason}}}
        return output if isinstance(prompts, str) else [output]


class InteractionLoopAgent:
    """Implement `Agent` with an object of the user's class, made for each episode.

    Args:
        make: the class, with the arguments that the user gives.
        rewards: the reward functions of the file.
        transform: makes one number of their values; None: they are summed, by name.
        limits: of the run.
    """

    def __init__(
        self, make: Callable[..., Any], rewards: list[Any], transform: Callable[..., Any] | None, limits: RunLimits
    ) -> None:
        self._make = make
        self._rewards = rewards
        self._transform = transform
        self._limits = limits
        self._state: Any = None

    def run(self, task: EpisodeTask, asking: Asking) -> Ended:
        """Run the loop once, which has as many turns as it makes."""
        environment = self._make(
            tokenizer=self._limits.tokenizer(), reward_functions=self._rewards, max_steps=self._limits.max_turns
        )
        messages = [
            stand_ins.ChatMessage(**{**message, "content": message.get("content") or ""}) for message in task.messages
        ]
        sample = stand_ins.SampleState(
            messages=messages, ground_truth=task.ground_truth, init_msg_size=len(task.messages)
        )
        self._state = stand_ins.EnvState(sample_states=[sample])
        returned = environment._run_interaction_loop(self._state, _Engine(asking), {})
        if not hasattr(returned, "sample_states"):
            raise EpisodeFailure("_run_interaction_loop has to return the EnvState")
        self._state = returned
        return Ended(reward=self.truncated(), info={})

    def check(self, token_ids: list[int], turns: list[tuple[int, int]], returned: Ended) -> None:
        """Compare nothing: the loop says nothing of tokens."""

    def truncated(self) -> Any:
        """Return the rewards of the conversation so far."""
        sample = self._state.sample_states[0]
        values = {each.name: one_number(each(sample.messages, sample.ground_truth)) for each in self._rewards}
        if self._transform is None:
            return values
        import torch

        return one_number(self._transform({name: torch.tensor([float(value)]) for name, value in values.items()}))


def reward_functions(module: ModuleType) -> list[Any]:
    """Return an object of each reward class that a file defines, in its order."""
    return [
        each()
        for each in vars(module).values()
        if inspect.isclass(each) and each.__module__ == module.__name__ and has_base(each, "BaseRewardFunction")
    ]


def has_base(made: object, name: str) -> bool:
    """Return True for a class that inherits from one of this name; it is known by it, wherever it comes from."""
    return inspect.isclass(made) and any(base.__name__ == name for base in made.__mro__[1:])
