"""Make a user's episodes, of the class that --env names: it is checked in the driver, made in each producer."""

import functools
import inspect
from collections.abc import Callable

from coati_rl.config.environment import EnvironmentConfig
from coati_rl.errors import ConfigError
from coati_rl.plugins import load_function
from producer.environments.episode import Episode


def episode_factory(config: EnvironmentConfig) -> Callable[[], Episode]:
    """Return what makes the object of an episode; none is made here.

    Raises: ConfigError for a file that cannot be imported, a class without `reset` or `step`, arguments that it does
        not take.
    """
    if config.env is None:
        raise ConfigError("--env: names no environment; give FILE.py:CLASS")
    made = load_function(config.env, flag="--env")
    methods = [getattr(made, name, None) for name in ("reset", "step")]
    if inspect.isclass(made) and not all(map(callable, methods)):
        raise ConfigError(
            f"--env {config.env}: the class needs the methods reset(task) and step(action); docs/agents.md shows one"
        )
    arguments = config.arguments
    try:
        inspect.signature(made).bind(**arguments)
    except (TypeError, ValueError) as error:
        given = " ".join(config.env_arg) or "nothing"
        raise ConfigError(f"--env-arg {given}: {config.env} does not take these: {error}") from error
    factory: Callable[[], Episode] = functools.partial(made, **arguments)
    return factory
