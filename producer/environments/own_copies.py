"""Copy what a user's code is given, so that what it changes there is its own.

The episodes of a prompt share its row, all episodes of a producer the arguments of --env-arg, and the conversation is
what the next contexts are rendered from.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from producer.environments.episode import Action, EpisodeFailure, EpisodeTask


def own_task(task: EpisodeTask) -> EpisodeTask:
    """Return a task with messages and columns of its own. Raises: EpisodeFailure for what cannot be copied."""
    columns = {name: own_copy(value, f"the column {name!r}") for name, value in task.columns.items()}
    return replace(task, messages=own_copy(task.messages, "messages"), columns=columns)


def own_action(action: Action) -> Action:
    """Return an action with a conversation of its own. Raises: EpisodeFailure for what cannot be copied."""
    return replace(action, messages=own_copy(action.messages, "messages"))


def own_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a class for one object of it. Raises: EpisodeFailure for what cannot be copied."""
    return {name: own_copy(value, f"the argument {name!r} (--env-arg)") for name, value in arguments.items()}


def own_copy(value: Any, name: str) -> Any:
    """Return a deep copy. Raises: EpisodeFailure that names what cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception as error:  # an object may raise what it likes
        raise EpisodeFailure(
            f"{name} cannot be copied for an episode, which may change it: {type(error).__name__}: {error}"
        ) from error
