"""Choose the environment that answers the policy in episodes of several turns, and its limits."""

import json
import re
from typing import Any, Literal

from pydantic import field_validator

from coati_rl.config.fields import Section, execution, experiment
from coati_rl.plugins import absolute, absolute_plugin

EnvironmentIsolation = Literal["thread", "process"]
StaleEpisodes = Literal["wait", "cut"]

_ARGUMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


class EnvironmentConfig(Section):
    """Episodes of several turns: what answers the policy, and for how long."""

    env: str | None = experiment(
        None,
        "Environment of multi-turn episodes: FILE.py:CLASS with reset and step, FILE.py of an agent of RL2, RL4LLM or "
        "OpenRLHF, or textarena:GAME (docs/agents.md). Rewards are its own, -rt env, unless -rt names others, which "
        "are added. Default: one answer to each prompt.",
    )
    env_arg: list[str] = experiment(
        [],
        "NAME=VALUE for the class of --env, a JSON value or text; repeat the flag for several.",
        metavar="NAME=VALUE",
    )
    env_isolation: EnvironmentIsolation = execution(
        "thread",
        "Where the code of --env runs: in threads of the producer, or each episode in a process of its own, for code "
        "that uses global state (random seeds, the working directory) or may hang for ever.",
    )
    max_turns: int = experiment(16, "Answers of the policy in an episode of --env at most.", ge=1)
    env_timeout: float = execution(
        60.0, "Time for each call of --env's reset, step and close, seconds; past it the sample is invalid.", gt=0
    )

    stale_episodes: StaleEpisodes = experiment(
        "wait",
        "Where trainers wait for an episode that would get staler than --n-behind: wait until it ends, or cut it, so "
        "that its sample is invalid and the others of its group are trained.",
    )

    @field_validator("env")
    @classmethod
    def _path_is_absolute(cls, name: str | None) -> str | None:
        if name and name.startswith("textarena:"):
            return name
        if name and name.endswith(".py"):  # of another system: what is in it is known by its name
            return str(absolute(name))
        return name and absolute_plugin(name)

    @field_validator("env_arg")
    @classmethod
    def _have_names(cls, texts: list[str]) -> list[str]:
        names = []
        for text in texts:
            match = _ARGUMENT.fullmatch(text)
            if match is None:
                raise ValueError(f"{text!r} is no argument; write NAME=VALUE")
            names.append(match[1])
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice} is given twice; give it once")
        return texts

    @property
    def is_given(self) -> bool:
        """True if something answers the policy."""
        return self.env is not None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the class, by name: values are JSON, or text if they are none."""
        return {name: _value(value) for name, _, value in (text.partition("=") for text in self.env_arg)}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
