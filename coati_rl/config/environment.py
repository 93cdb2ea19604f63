"""Choose the environment that answers the policy in episodes of several turns, and its limits."""

from typing import Literal

from pydantic import field_validator

from coati_rl.config.fields import Section, execution, experiment
from coati_rl.plugins import absolute_plugin

EnvironmentIsolation = Literal["thread", "process"]

TEXTARENA = "textarena:"  # before the name of a game


class EnvironmentConfig(Section):
    """Episodes of several turns: what answers the policy, and for how long."""

    env: str | None = experiment(
        None,
        "Environment of multi-turn episodes: FILE.py:CLASS with reset, step and close; default: one answer to each "
        "prompt.",
    )
    env_arg: list[str] = experiment(
        [],
        "NAME=VALUE given to the environment's class, JSON or text; repeat the flag for several.",
        metavar="NAME=VALUE",
    )
    env_isolation: EnvironmentIsolation = execution(
        "thread", "Where sync code of an environment runs: in a thread, or in a process for each episode."
    )
    max_turns: int = experiment(16, "Answers of the policy in an episode of --env at most.", ge=1)
    env_timeout: float = execution(
        60.0, "Time for each call of an environment, seconds; past it the sample is invalid.", gt=0
    )

    @field_validator("env")
    @classmethod
    def _path_is_absolute(cls, name: str | None) -> str | None:
        return name if name is None or name.startswith(TEXTARENA) else absolute_plugin(name)
