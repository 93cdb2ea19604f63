"""Make the episodes of the file that --env names: it is checked in the driver, and read in each producer."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.plugins import load_function, load_module
from producer.environments.compatible.forms import AgentForm, form_of, object_of
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.own_copies import own_arguments
from producer.environments.textarena_game import PREFIX, TextArenaEpisode, check_game


def episode_factory(name: str, arguments: Mapping[str, Any], limits: RunLimits | None = None) -> AgentForm:
    """Return what makes the object of an episode; none is made here.

    Args:
        name: FILE.py:CLASS, or FILE.py of an agent of another system, with an absolute path; or textarena:GAME.
        arguments: of the class, by name.
        limits: of the run, which agents of other systems need; None: this is a check.
    Raises: ConfigError for a file that cannot be imported, a class without `reset` or `step`, arguments that it does
        not take, a game that cannot be played.
    """
    if name.startswith(PREFIX):
        game = name.removeprefix(PREFIX)
        if limits is None:  # a check
            check_game(game, arguments)
        return AgentForm(make=lambda: TextArenaEpisode(game, own_arguments(arguments)))
    is_file = name.endswith(".py")
    module = load_module(Path(name if is_file else name.rpartition(":")[0]), name, flag="--env")
    made = object_of(module, name) if is_file else load_function(name, flag="--env")
    form = form_of(made, module, arguments, name=name, limits=limits)
    if form is not None:
        return form
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
    return AgentForm(make=lambda: made(**own_arguments(arguments)))
