"""Make a user's episodes, of the class that --env names: it is checked in the driver, made in each producer."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.plugins import load_function
from producer.environments.episode import Episode


def episode_factory(name: str, arguments: Mapping[str, Any]) -> Callable[[], Episode]:
    """Return what makes the object of an episode; none is made here.

    Args:
        name: FILE.py:CLASS, with an absolute path.
        arguments: of the class, by name.
    Raises: ConfigError for a file that cannot be imported, a class without `reset` or `step`, arguments that it does
        not take.
    """
    made = load_function(name, flag="--env")
    methods = [getattr(made, method, None) for method in ("reset", "step")]
    if inspect.isclass(made) and not all(map(callable, methods)):
        raise ConfigError(
            f"--env {name}: the class needs the methods reset(task) and step(action); docs/agents.md shows one"
        )
    try:
        inspect.signature(made).bind(**arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(arguments) or "nothing"
        raise ConfigError(f"--env-arg: {name} is given {given}, and does not take these: {error}") from error
    factory: Callable[[], Episode] = functools.partial(made, **arguments)
    return factory
