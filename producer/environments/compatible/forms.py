"""Recognise what --env names: an agent of another system by what it has, or an episode of one's own.

| form | of | known by |
|---|---|---|
| `interact(messages)`, and `reward_fn(messages, answer)` in the same file | RL2 | the function's one parameter |
| `env_step(state, action, answer)` | RL2 | its parameters |
| a class with `_run_interaction_loop` | RL4LLM | the method; rewards are the BaseRewardFunction classes of its file |
| a class with `reset(states)`, `step(states)` | OpenRLHF | its base class AgentInstanceBase |
| a class with `execute`, or one that is given an AgentInstance | OpenRLHF | its base class or the method |
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from coati_rl.errors import ConfigError
from producer.environments.compatible.driven import DrivenEpisode
from producer.environments.compatible.executor import ARGUMENTS, ExecutorAgent
from producer.environments.compatible.openrlhf import AgentInstanceEpisode
from producer.environments.compatible.rl2 import EnvStepEpisode, InteractEpisode
from producer.environments.compatible.rl4llm import InteractionLoopAgent, has_base, reward_functions
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.episode import Episode

NAMES = ("interact", "env_step", "AgentExecutor", "AgentInstance")  # of a file without a name, the first that it has


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Hold how an agent of another system is played."""

    make: Callable[[], Episode]
    gives_rewards: bool = True
    rewards: tuple[str, ...] = ()  # names in the agent's file that it is scored with, as -rt could name them


def object_of(module: ModuleType, name: str) -> Any:
    """Return what a file without a name is about. Raises: ConfigError."""
    for each in NAMES:
        if callable(getattr(module, each, None)):
            return getattr(module, each)
    loops = [each for each in vars(module).values() if has_base(each, "BaseMDPEnv") and _is_of(each, module)]
    if len(loops) == 1:
        return loops[0]
    found = "several classes of BaseMDPEnv" if loops else "none of these"
    raise ConfigError(
        f"--env {name}: names no class, and the file has {found}: {', '.join(NAMES)}, a BaseMDPEnv; write FILE.py:CLASS"
    )


def form_of(
    made: Any, module: ModuleType, arguments: Mapping[str, Any], *, name: str, limits: RunLimits | None
) -> Form | None:
    """Return how an object is played; None for an episode of one's own.

    Args:
        made: a function or a class.
        module: of the user's file.
        arguments: of a class, by name.
        name: of --env, for messages.
        limits: of the run; None: it is only checked, and nothing is made.
    Raises: ConfigError for arguments that it does not take, and for what cannot be run.
    """
    is_class: bool = inspect.isclass(made)
    if not is_class:
        return _function_form(made, module, arguments, name)
    if callable(getattr(made, "_run_interaction_loop", None)):
        return _loop_form(made, module, arguments, name, limits)
    if has_base(made, "AgentInstanceBase"):
        _check_arguments(made, arguments, name)
        return Form(make=lambda: AgentInstanceEpisode(lambda: (made, arguments)))
    if has_base(made, "MultiTurnAgentExecutor") and not callable(getattr(made, "execute", None)):
        _check_arguments(made, arguments, name)
        return Form(make=lambda: AgentInstanceEpisode(lambda: (made(**arguments).agent_instance_cls, {})))
    if callable(getattr(made, "execute", None)) and not callable(getattr(made, "step", None)):
        return _executor_form(made, arguments, name, limits)
    return None


def _function_form(made: Any, module: ModuleType, arguments: Mapping[str, Any], name: str) -> Form | None:
    try:
        parameters = list(inspect.signature(made).parameters)
    except (TypeError, ValueError):
        return None
    form: Form | None = None
    if parameters == ["messages"]:
        reward_fn = getattr(module, "reward_fn", None)
        rewards = ("reward_fn",) if callable(reward_fn) else ()
        form = Form(make=lambda: InteractEpisode(made, reward_fn), gives_rewards=bool(rewards), rewards=rewards)
    elif parameters[:3] == ["state", "action", "answer"]:
        form = Form(make=lambda: EnvStepEpisode(made))
    elif getattr(made, "__name__", "") == "env_step":
        raise ConfigError(
            f"--env {name}: env_step takes ({', '.join(parameters)}); of RL2's forms (state, action, answer) can be "
            "run, and not those that are given its Sample, which records the tokens itself"
        )
    if form is not None and arguments:
        raise ConfigError(f"--env-arg: {name} is a function, which takes no arguments of its own; leave them out")
    return form


def _loop_form(
    made: type, module: ModuleType, arguments: Mapping[str, Any], name: str, limits: RunLimits | None
) -> Form:
    rewards = reward_functions(module)
    transform = getattr(module, "reward_transform_fn", None)
    _check_arguments(made, {"tokenizer": None, "reward_functions": rewards, "max_steps": 1, **arguments}, name)

    def make() -> Episode:
        agent = InteractionLoopAgent(functools.partial(made, **arguments), rewards, transform, _needed(limits))
        return DrivenEpisode(agent, _needed(limits))

    if limits is not None:
        limits.tokenizer()  # once, and not in each episode's process
    return Form(make=make, gives_rewards=bool(rewards), rewards=tuple(type(each).__name__ for each in rewards))


def _executor_form(made: type, arguments: Mapping[str, Any], name: str, limits: RunLimits | None) -> Form:
    _check_arguments(made, arguments, name)
    parameters = inspect.signature(made.execute).parameters  # type: ignore[attr-defined]
    if not {*ARGUMENTS} <= parameters.keys():
        raise ConfigError(
            f"--env {name}: execute takes ({', '.join(parameters)}); it is called with {', '.join(ARGUMENTS)}, as by "
            "OpenRLHF 0.9"
        )

    def make() -> Episode:
        agent = ExecutorAgent(functools.partial(made, **arguments), _needed(limits))
        return DrivenEpisode(agent, _needed(limits))

    if limits is not None:
        limits.tokenizer()
    return Form(make=make)


def _check_arguments(made: type, arguments: Mapping[str, Any], name: str) -> None:
    try:
        inspect.signature(made).bind(**arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(arguments) or "nothing"
        raise ConfigError(f"--env-arg: {name} is given {given}, and does not take these: {error}") from error


def _needed(limits: RunLimits | None) -> RunLimits:
    if limits is None:
        raise ConfigError("an agent that asks the engine itself needs the run's tokenizer")
    return limits


def _is_of(made: Any, module: ModuleType) -> bool:
    return bool(made.__module__ == module.__name__)
