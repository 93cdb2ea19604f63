"""Choose the environment that answers the policy in episodes of several turns, and its limits."""

import shlex
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from coati_rl.config.fields import Needs, Section, execution, experiment
from coati_rl.config.named_values import NamedValues, named_values
from coati_rl.config.user_paths import exists
from coati_rl.plugins import absolute, absolute_plugin, is_plugin

ToolFormat = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "qwen_xml"]
EnvironmentIsolation = Literal["thread", "process"]
StaleEpisodes = Literal["wait", "cut"]

TOOLS = ("calculator", "python")  # that need no file

_CALLED: Needs = {"env": (), "tools": (), "mcp_server": ()}  # what is called by the producer and no program


class EnvironmentConfig(Section):
    """Episodes of several turns: what answers the policy, and for how long."""

    env: str | None = experiment(
        None,
        "Environment of multi-turn episodes: FILE.py:CLASS with reset and step, FILE.py of an agent of RL2, RL4LLM or "
        "OpenRLHF, or textarena:GAME (docs/agents.md). Rewards are its own, -rt env, unless -rt names others, which "
        "are added. Default: one answer to each prompt.",
    )
    env_arg: NamedValues = experiment(
        [],
        "NAME=VALUE for the class of --env, a JSON value or text; repeat the flag for several.",
        metavar="NAME=VALUE",
        needs=_CALLED,
    )
    env_isolation: EnvironmentIsolation = execution(
        "thread",
        "Where the code of --env runs: in threads of the producer, or each episode in a process of its own, for code "
        "that uses global state (random seeds, the working directory) or may hang for ever.",
        needs={"env": ()},
    )
    max_turns: int = experiment(16, "Answers of the policy in an episode of --env at most.", ge=1, needs=_CALLED)
    env_timeout: float = execution(
        60.0,
        "Time for each call of --env's reset, step and close, seconds; past it the sample is invalid.",
        gt=0,
        needs=_CALLED,
    )
    agent_command: str | None = experiment(
        None,
        "Program that is started for each episode, in place of --env: it asks the policy by OpenAI's API "
        "(docs/agents.md), such as 'python agent.py'. Rewards as with --env.",
        metavar="COMMAND",
    )
    agent_timeout: float = execution(
        600.0,
        "Time for an agent's whole episode, seconds; past it the sample is invalid.",
        gt=0,
        needs={"agent_command": ()},
    )
    agent_processes: int = execution(64, "Agents that a producer runs at a time.", ge=1, needs={"agent_command": ()})
    agent_ground_truth: bool = experiment(
        False,
        "Tell agents the ground truth of their task, so that they can compute rewards.",
        needs={"agent_command": ()},
    )

    tools: list[str] = experiment(
        [],
        "Tools that the policy may call, separated by commas: calculator, python (in the sandbox; variables are kept "
        "in an episode), FILE.py:FUNCTION of your own (docs/agents.md). An answer without a call ends the episode.",
        metavar="NAMES",
    )
    mcp_server: list[str] = experiment(
        [],
        "Command that starts an MCP server, whose tools the policy may call; one process in each producer. Repeat the "
        "flag for several.",
        metavar="COMMAND",
    )
    tool_format: ToolFormat = experiment(
        "auto",
        "Format in which the model writes tool calls; auto: that of its chat template.",
        needs={"tools": (), "mcp_server": (), "agent_command": ()},
    )
    stale_episodes: StaleEpisodes = experiment(
        "wait",
        "Where trainers wait for an episode that would get staler than --n-behind: wait until it ends, or cut it, so "
        "that its sample is invalid and the others of its group are trained.",
        needs={**_CALLED, "agent_command": ()},
    )

    @field_validator("env")
    @classmethod
    def _path_is_absolute(cls, name: str | None) -> str | None:
        if name and name.startswith("textarena:"):
            return name
        if name and name.endswith(".py"):  # of another system: what is in it is known by its name
            return str(absolute(name))
        if name and not is_plugin(name):
            raise ValueError("is no environment; write FILE.py:CLASS")
        return name and absolute_plugin(name)

    @field_validator("agent_command")
    @classmethod
    def _files_are_absolute(cls, command: str | None) -> str | None:
        """Return the command with absolute paths of the files that it names: producers run it elsewhere."""
        if command is None:
            return None
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"is no command: {error}") from error
        if not words:
            raise ValueError("is empty; write a program and its arguments, such as 'python agent.py'")
        return shlex.join(
            str(Path(word).absolute()) if exists(word) and Path(word).is_file() else word for word in words
        )

    @field_validator("tools")
    @classmethod
    def _are_names(cls, texts: list[str]) -> list[str]:
        names = [absolute_plugin(name.strip()) for text in texts for name in text.split(",") if name.strip()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice} is given twice; give it once")
        if unknown := next((name for name in names if name not in TOOLS and not is_plugin(name)), None):
            raise ValueError(f"{unknown} is no tool; use {', '.join(TOOLS)} or FILE.py:FUNCTION")
        return names

    @field_validator("mcp_server")
    @classmethod
    def _are_commands(cls, commands: list[str]) -> list[str]:
        for command in commands:
            if not _words(command):
                raise ValueError(f"{command!r} is no command; write it as in a shell")
        return commands

    @property
    def has_tools(self) -> bool:
        """True if the policy may call tools."""
        return bool(self.tools or self.mcp_server)

    @property
    def gives_rewards(self) -> bool:
        """True if what answers the policy rewards it, too."""
        return self.env is not None or self.agent_command is not None

    @property
    def is_given(self) -> bool:
        """True if something answers the policy."""
        return self.gives_rewards or self.has_tools

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the class, by name: values are JSON, or text if they are none."""
        return named_values(self.env_arg)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{command!r}: {error}") from error
