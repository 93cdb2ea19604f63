"""Play RL4LLM's environments: `_run_interaction_loop`, which asks the engine with texts, on a batch of one sample.

The environment makes the reward, as RL4LLM's does: one reward function, or several and what makes one number of them.

Source: the README of github.com/michaelnny/rl4llm, section Customization, and its rl4llm/core/base_env.py.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coati_rl.stand_ins import rl4llm as stand_ins
from producer.environments.compatible.driven import Asking, Ended
from producer.environments.compatible.openrlhf import one_number
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.compatible.sampling import changes_of, fields_of
from producer.environments.episode import EpisodeFailure, EpisodeTask, Message
from producer.environments.own_copies import own_arguments

_BASE = "BaseMDPEnv"


class _Engine:
    """Stand in for the inference client that the loop is given."""

    def __init__(self, asking: Asking, sampling: Mapping[str, Any]) -> None:
        self._asking = asking
        self._sampling = sampling

    def generate(self, prompts: Any, sampling_params: Any = None, **other: Any) -> Any:
        """Sample an answer to a text, or to a list of one."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if len(texts) != 1 or not isinstance(texts[0], str) or any(other.values()):
            raise EpisodeFailure("llm.generate takes one text and sampling_params; a batch is one sample here")
        action = self._asking.ask(texts[0], changes_of(sampling_params, self._sampling)).result()
        output = {"text": action.text, "meta_info": {"finish_reason": {"type": action.finish_reason}}}
        return output if isinstance(prompts, str) else [output]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopEnvironment:
    """Hold a class with `_run_interaction_loop`, and what its file has for it."""

    made: type
    arguments: Mapping[str, Any]  # of the user
    rewards: tuple[Any, ...]  # objects with a `name`, called with messages and the ground truth
    transform: Callable[..., Any] | None  # makes one number of several rewards

    def make(self, tokenizer: Any, *, max_steps: int, messages: Sequence[Message], ground_truth: Any) -> Any:
        """Return an environment of one sample. Raises: what its constructor raises."""
        given = self.given(messages, ground_truth)
        values = {"tokenizer": tokenizer, "max_steps": max_steps}
        of_run = {name: values[name] for name in given if name in values}
        return self.made(**{**given, **of_run, **own_arguments(self.arguments)})

    def given(self, messages: Sequence[Message], ground_truth: Any) -> dict[str, Any]:
        """Return the arguments of the run that the constructor takes; tokenizer and max_steps are None."""
        values: dict[str, Any] = {
            "tokenizer": None,
            "max_steps": None,
            "reward_functions": [*self.rewards],
            "reward_transform_fn": self.transform,
            "batch_size": 1,
            "group_size": 1,
        }
        if self._base is not stand_ins.BaseMDPEnv:
            import datasets  # theirs checks its rows

            row = {"messages": [_plain(message) for message in messages], "ground_truth": ground_truth}
            values["dataset"] = datasets.Dataset.from_list([row])
        parameters = inspect.signature(self.made).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return {name: value for name, value in values.items() if takes_all or name in parameters}

    def state(self, messages: Sequence[Message], ground_truth: Any) -> Any:
        """Return the state of one sample, of the classes that the environment's base class comes with."""
        types = stand_ins if self._base is None else sys.modules[self._base.__module__]
        message_type, sample_type, state_type = (
            getattr(types, name, getattr(stand_ins, name)) for name in ("ChatMessage", "SampleState", "EnvState")
        )
        said = [message_type(**_plain(message)) for message in messages]
        sample = sample_type(messages=said, ground_truth=ground_truth, init_msg_size=len(said))
        return state_type(sample_states=[sample])

    @property
    def makes_rewards_itself(self) -> bool:
        """Return True if the class may combine rewards in a way that its file's functions do not show."""
        names = ("__init__", "_calculate_rewards", "_transform_rewards")
        own = [each for each in self.made.__mro__ if each not in (self._base, object)]
        return any(name in vars(each) for each in own for name in names)

    @property
    def _base(self) -> type | None:
        return next((each for each in self.made.__mro__[1:] if each.__name__ == _BASE), None)


class InteractionLoopAgent:
    """Implement `Agent` with an object of the user's class, made for each episode."""

    def __init__(self, environment: LoopEnvironment, limits: RunLimits) -> None:
        self._of = environment
        self._limits = limits
        self._environment: Any = None
        self._state: Any = None

    def run(self, task: EpisodeTask, asking: Asking) -> Ended:
        """Run the loop once, which has as many turns as it makes."""
        self._environment = self._of.make(
            self._limits.tokenizer(),
            max_steps=self._limits.max_turns,
            messages=task.messages,
            ground_truth=task.ground_truth,
        )
        self._state = self._of.state(task.messages, task.ground_truth)
        returned = self._environment._run_interaction_loop(
            self._state, _Engine(asking, task.sampling), fields_of(task.sampling)
        )
        if not hasattr(returned, "sample_states"):
            raise EpisodeFailure("_run_interaction_loop has to return the EnvState")
        self._state = returned
        if (role := returned.sample_states[0].messages[-1].role) != "assistant":
            raise EpisodeFailure(f"the conversation ends with a message of the role {role}; RL4LLM refuses it, too")
        reward, metrics = self._rewards()
        return Ended(reward=reward, info={}, metrics=metrics)

    def check(self, token_ids: list[int], turns: list[tuple[int, int]], returned: Ended) -> None:
        """Compare nothing: the loop says nothing of tokens."""

    def truncated(self) -> Any:
        """Return the reward of the conversation so far."""
        return self._rewards()[0]

    def _rewards(self) -> tuple[Any, dict[str, float]]:
        """Return the reward, and those that it was made of, if it was made."""
        sample = self._state.sample_states[0]
        calculate = getattr(self._environment, "_calculate_rewards", None)
        if calculate is None:  # the class has only the loop
            calculate = stand_ins.BaseMDPEnv(
                tokenizer=self._limits.tokenizer(),
                reward_functions=self._of.rewards,
                reward_transform_fn=self._of.transform,
            )._calculate_rewards
        total, by_name = calculate([sample])
        reward, named = one_number(total), {name: one_number(value) for name, value in by_name.items()}
        if self._of.transform is None and [*named.values()] == [reward]:
            return named, {}
        return reward, named


def reward_functions(module: Any) -> tuple[Any, ...]:
    """Return the rewards of a file: its list `reward_functions`, or an object of each reward class that it defines.

    Raises: ValueError for a class that cannot be made, and for two rewards of one name.
    """
    listed = getattr(module, "reward_functions", None)
    if isinstance(listed, list | tuple):
        rewards = tuple(listed)
    else:
        classes = [
            each
            for each in vars(module).values()
            if inspect.isclass(each)
            and each.__module__ == module.__name__
            and has_base(each, "BaseRewardFunction")
            and not inspect.isabstract(each)
            and any("__call__" in vars(base) for base in each.__mro__)
        ]
        rewards = tuple(_made(each) for each in classes)
    names = [str(getattr(each, "name", each)) for each in rewards]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"two rewards have the name {twice[0]!r}, and one of them would be lost; name them differently, or write "
            "reward_functions = [...] with those that count"
        )
    return rewards


def transform_of(module: Any, *, is_needed: bool) -> Callable[..., Any] | None:
    """Return the function of a file that makes the reward, None if there is none.

    It is known by its name, `reward_transform_fn`; where several rewards need one, also by its one parameter,
    `reward_dict`, as RL4LLM prints both.

    Raises: ValueError if there are several.
    """
    named = getattr(module, "reward_transform_fn", None)
    if callable(named):
        return named  # type: ignore[no-any-return]
    if not is_needed:
        return None
    found = [
        each
        for each in vars(module).values()
        if inspect.isfunction(each)
        and each.__module__ == module.__name__
        and [*inspect.signature(each).parameters] == ["reward_dict"]
    ]
    if len(found) > 1:
        names = " and ".join(each.__name__ for each in found)
        raise ValueError(f"{names} both take reward_dict; call the one that counts reward_transform_fn")
    return found[0] if found else None


def has_base(made: object, name: str) -> bool:
    """Return True for a class that inherits from one of this name; it is known by it, wherever it comes from."""
    return inspect.isclass(made) and any(base.__name__ == name for base in made.__mro__[1:])


def _made(reward: type) -> Any:
    try:
        return reward()
    except Exception as error:
        raise ValueError(
            f"the reward {reward.__name__} cannot be made without arguments ({type(error).__name__}: {error}); give "
            f"its parameters defaults, or write reward_functions = [{reward.__name__}(...)] in the file"
        ) from error


def _plain(message: Message) -> dict[str, Any]:
    return {**message, "content": message.get("content") or ""}
