"""Recognise how a user's reward function is called, by the names of its parameters.

| form | of | called with |
|---|---|---|
| `f(messages, answer)` | RL2 | the conversation with the response as its last message, and the ground truth |
| `f(messages, ground_truth)` | RL4LLM | the same; a message has `.content` as well as `["content"]` |
| `f(queries, prompts, labels)` | OpenRLHF | a group; each query is the rendered prompt with a response |
| `f(prompts, completions)` | TRL | a group, conversations as lists of messages |
| `f(data_source, solution_str, ground_truth, extra_info)` | verl | texts, and columns of the row |
| `f(response, ground_truth)` | | two texts |

The ground truth may be left out, or have a default for rows without one, except in RL4LLM's form, which it identifies.
In TRL's form any further parameter is a column of the row, a list with a value for each response. Of the others,
RL4LLM's `**kwargs` are all columns. All further parameters need defaults.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from coati_rl.errors import ConfigError
from coati_rl.reward_spec import NO_COLUMNS, RewardColumns

FormName = Literal["messages", "rl4llm", "group", "trl", "verl", "texts"]

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_OF_TRL = ("prompts", "completions")
_VERL_COLUMNS = ("data_source", "extra_info")
_UNSUPPORTED = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")  # of TRL's trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionForm:
    """Describe how a function is called."""

    name: FormName
    truth: str | None = None  # its parameter for the ground truth; None: it has none
    needs_truth: bool = False  # it cannot be called without
    parameters: frozenset[str] = frozenset()  # its names; of columns, in TRL's and verl's form
    takes_rest: bool = False  # it has **kwargs
    columns: RewardColumns = NO_COLUMNS

    @property
    def is_batch(self) -> bool:
        """Return True if it is called once for a group."""
        return self.name in ("group", "trl")


def form_of(function: Callable[..., Any], name: str) -> FunctionForm:
    """Find the form of a function's parameters. Raises: ConfigError with the supported forms."""
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # written in C, without a signature
        parameters = inspect.signature(function).parameters
    named = {key for key, parameter in parameters.items() if parameter.kind in _BY_NAME}
    found: FunctionForm | None = None
    if {"messages", "ground_truth"} <= named and "answer" not in named:  # else the ground truth would not be given
        found = _form("rl4llm", ("messages",), "ground_truth", parameters)
    found = (
        found
        or _form("messages", ("messages",), "answer", parameters)
        or _form("group", ("queries", "prompts"), "labels", parameters)
        or _form("texts", ("response",), "ground_truth", parameters)
        or _form("verl", ("solution_str",), "ground_truth", parameters, columns=_VERL_COLUMNS)
        or _trl_form(parameters)
    )
    if found is None:
        takes = f"takes ({', '.join(map(str, parameters.values()))})" if parameters else "names no parameters"
        raise ConfigError(
            f"--reward-type {name}: {takes}; a reward function takes (messages, answer), (queries, prompts, labels) or "
            "(response, ground_truth), with or without the last parameter; or, as in TRL, (prompts, completions) and "
            "columns of the row; as in verl, (data_source, solution_str, ground_truth, extra_info); as in RL4LLM, "
            "(messages, ground_truth); all other parameters need defaults"
        )
    return found


def _form(
    name: FormName,
    required: tuple[str, ...],
    truth_name: str,
    parameters: Mapping[str, inspect.Parameter],
    *,
    columns: tuple[str, ...] = (),
) -> FunctionForm | None:
    """Return the form if these parameters have it; all others need defaults."""
    truth = parameters.get(truth_name)
    if not all(key in parameters and parameters[key].kind in _BY_NAME for key in required):
        return None
    others = [parameter for key, parameter in parameters.items() if key not in (*required, truth_name, *columns)]
    takes_rest = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in others)
    if truth is None:
        if name in ("messages", "group", "texts") and any(parameter.kind in _REST for parameter in others):
            return None  # its ground truth may be in *args or **kwargs, where its name is unknown
    elif truth.kind not in _BY_NAME:
        return None
    if not all(parameter.default is not parameter.empty or parameter.kind in _REST for parameter in others):
        return None
    read = [key for key in columns if key in parameters]
    reads_rest = takes_rest and name == "rl4llm"
    needed = tuple(key for key in read if key == "data_source" and parameters[key].default is parameters[key].empty)
    return FunctionForm(
        name=name,
        truth=None if truth is None else truth_name,
        needs_truth=truth is not None and truth.default is truth.empty,
        parameters=frozenset(read),
        takes_rest=takes_rest,
        columns=RewardColumns(required=needed, are_kept=bool(read) or reads_rest),
    )


def _trl_form(parameters: Mapping[str, inspect.Parameter]) -> FunctionForm | None:
    named = {key: parameter for key, parameter in parameters.items() if parameter.kind in _BY_NAME}
    if "completions" not in named:
        return None
    kinds = {parameter.kind for parameter in parameters.values()}
    needed = [key for key, each in named.items() if each.default is each.empty and key not in _OF_TRL]
    if not kinds <= {*_BY_NAME, inspect.Parameter.VAR_KEYWORD} or any(key in _UNSUPPORTED for key in needed):
        return None
    takes_rest = inspect.Parameter.VAR_KEYWORD in kinds
    return FunctionForm(
        name="trl",
        parameters=frozenset(named) - {"completions"},
        takes_rest=takes_rest,
        columns=RewardColumns(required=tuple(needed), are_kept=True),  # a row's own prompt says if it is text
    )
