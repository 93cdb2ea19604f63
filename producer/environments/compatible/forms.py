"""Recognise what --env names: an agent of another system by what it has, or an episode of one's own.

| form | of | known by |
|---|---|---|
| `interact(messages)`, and `reward_fn(messages, answer)` in the same file | RL2 | the function's one parameter |
| `env_step(state, action, answer)` | RL2 | its parameters |
| a class with `_run_interaction_loop` | RL4LLM | the method; its rewards are those of its file |
| a class with `reset(states)`, `step(states)` | OpenRLHF | its base class AgentInstanceBase |
| a class with `execute`, or one that is given an AgentInstance | OpenRLHF | its base class or the method |
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from coati_rl.errors import ConfigError
from producer.environments.compatible.driven import DrivenEpisode
from producer.environments.compatible.executor import ARGUMENTS, NOTHING, ExecutorAgent
from producer.environments.compatible.openrlhf import AgentInstanceEpisode
from producer.environments.compatible.rl2 import EnvStepEpisode, InteractEpisode
from producer.environments.compatible.rl4llm import (
    InteractionLoopAgent,
    LoopEnvironment,
    has_base,
    reward_functions,
    transform_of,
)
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.episode import Episode
from producer.environments.own_copies import own_arguments

_LOOP = "MultiTurnAgentExecutor"
_OLD = ("max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue")  # of constructors before 0.9
_OTHER_STEP = (
    ". Its function step is of OpenRLHF before 0.8 or of RL2 after its README; write it as RL2's "
    'env_step(state, action, answer), which returns {"next_state", "done", "reward"}'
)
NAMES = ("interact", "env_step", "AgentExecutor", "AgentInstance")  # of a file without a name, the first that it has


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentForm:
    """Hold how an agent of another system is played."""

    make: Callable[[], Episode]
    gives_rewards: bool = True
    rewards: tuple[str, ...] = ()  # names in the agent's file that it is scored with, as -rt could name them
    writes_messages: bool = False  # the turns are messages, which a chat template writes
    check_tokenizer: Callable[[Any], None] = lambda _: None  # raises ConfigError if it cannot be played with it


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
        + (_OTHER_STEP if callable(getattr(module, "step", None)) else "")
    )


def form_of(
    made: Any, module: ModuleType, arguments: Mapping[str, Any], *, name: str, limits: RunLimits | None
) -> AgentForm | None:
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
        return AgentForm(make=lambda: AgentInstanceEpisode(lambda: (made, own_arguments(arguments))))
    execute = next((each for each in made.__mro__ if "execute" in vars(each)), None)
    is_loop = has_base(made, _LOOP) and (execute is None or execute.__name__ == _LOOP)
    if (execute is None and not is_loop) or callable(getattr(made, "step", None)):
        return None
    if not is_loop:
        _check_execute(made, module, name)
    _check_constructor(made, module, name)
    _check_arguments(made, arguments, name)
    if is_loop:  # of steps, which are an episode's
        return AgentForm(
            make=lambda: AgentInstanceEpisode(lambda: (made(**own_arguments(arguments)).agent_instance_cls, {})),
            check_tokenizer=lambda _: _make_once(lambda: made(**own_arguments(arguments)).agent_instance_cls, name),
        )
    return _executor_form(made, arguments, name, limits)


def _function_form(made: Any, module: ModuleType, arguments: Mapping[str, Any], name: str) -> AgentForm | None:
    try:
        parameters = list(inspect.signature(made).parameters)
    except (TypeError, ValueError):
        return None
    form: AgentForm | None = None
    if parameters == ["messages"]:
        reward_fn = getattr(module, "reward_fn", None)
        rewards = ("reward_fn",) if callable(reward_fn) else ()
        form = AgentForm(
            make=lambda: InteractEpisode(made, reward_fn),
            gives_rewards=bool(rewards),
            rewards=rewards,
            writes_messages=True,
        )
    elif parameters[:3] == ["state", "action", "answer"]:
        form = AgentForm(make=lambda: EnvStepEpisode(made))
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
) -> AgentForm:
    try:
        rewards = reward_functions(module)
        transform = transform_of(module, is_needed=len(rewards) > 1)
    except ValueError as error:
        raise ConfigError(f"--env {name}: {error}") from error
    loop = LoopEnvironment(made=made, arguments=arguments, rewards=rewards, transform=transform)
    if len(rewards) > 1 and transform is None and not loop.makes_rewards_itself:
        names = ", ".join(str(each.name) for each in rewards)
        raise ConfigError(
            f"--env {name}: the file has several rewards ({names}) and nothing that makes one of them, which RL4LLM "
            "refuses, too; add its function reward_transform_fn(reward_dict)"
        )
    _check_arguments(made, {**loop.given([], None), **arguments}, name)

    def make() -> Episode:
        return DrivenEpisode(InteractionLoopAgent(loop, _needed(limits)), _needed(limits))

    def check_tokenizer(tokenizer: Any) -> None:
        said = [{"role": "user", "content": "question"}]
        _make_once(lambda: loop.make(tokenizer, max_steps=1, messages=said, ground_truth="answer"), name)

    if limits is not None:
        limits.tokenizer()  # once, and not in each episode's process
    classes = tuple(type(each).__name__ for each in rewards)
    return AgentForm(
        make=make,
        gives_rewards=bool(rewards),
        rewards=classes,
        writes_messages=True,
        check_tokenizer=check_tokenizer,
    )


def _executor_form(made: type, arguments: Mapping[str, Any], name: str, limits: RunLimits | None) -> AgentForm:
    def make_object() -> Any:
        return made(**own_arguments(arguments))

    def make() -> Episode:
        return DrivenEpisode(ExecutorAgent(make_object, _needed(limits)), _needed(limits))

    if limits is not None:
        limits.tokenizer()
    return AgentForm(make=make, check_tokenizer=lambda _: _make_once(make_object, name))


def _make_once(make: Callable[[], Any], name: str) -> None:
    """Make an object before anything starts. Raises: ConfigError if it cannot be made."""
    try:
        make()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--env {name}: cannot be made: {type(error).__name__}: {error}") from error


def _check_execute(made: type, module: ModuleType, name: str) -> None:
    """Raise ConfigError for a method `execute` of another form than OpenRLHF's since 0.9."""
    parameters = inspect.signature(made.execute).parameters  # type: ignore[attr-defined]
    needed = [
        key
        for key, each in parameters.items()
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and key != "self"
    ]
    missing = not {*ARGUMENTS} <= parameters.keys()
    if missing or not {*needed} <= {*ARGUMENTS, *NOTHING}:
        raise ConfigError(
            f"--env {name}: execute takes ({', '.join(parameters)}); it is called with {', '.join(ARGUMENTS)}, as by "
            f"OpenRLHF since 0.9{_steps_of(module, name)}"
        )


def _check_constructor(made: type, module: ModuleType, name: str) -> None:
    """Raise ConfigError for an executor of OpenRLHF before 0.9, which is given the engine when it is made."""
    given = [key for key in inspect.signature(made).parameters if key in _OLD]
    if given:
        raise ConfigError(
            f"--env {name}: the constructor takes {', '.join(given)}, as before OpenRLHF 0.9; take none of them, and "
            f"call super().__init__(AgentInstance){_steps_of(module, name)}"
        )


def _steps_of(module: ModuleType, name: str) -> str:
    """Return which class of the file can be played as it is, as the end of a message."""
    steps = [key for key, each in vars(module).items() if has_base(each, "AgentInstanceBase") and _is_of(each, module)]
    path = name if name.endswith(".py") else name.rpartition(":")[0]
    return f"; its class of steps can be played: --env {path}:{steps[0]}" if len(steps) == 1 else ""


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
