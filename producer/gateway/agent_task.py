"""Tell an agent its task: a JSON object in a file, and the environment variables of its process."""

import json
import os
import shlex
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from producer.environments.episode import EpisodeTask

# The producer's own: credentials of its cluster, settings of its engine, another gateway's address.
_WITHHELD = ("COATI_", "OPENAI_", "RAY_", "VLLM_")
_LOOPBACK = "127.0.0.1"
_SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl")


def check_agent(command: str) -> None:
    """Raise ConfigError if the program of --agent-command, or the script that it is given first, does not exist."""
    program, *arguments = shlex.split(command)
    if shutil.which(program) is None:
        raise ConfigError(f"--agent-command {command}: no program {program}; give a path, or a name on PATH")
    script = next((Path(word) for word in arguments if not word.startswith("-")), Path())
    if script.suffix in _SCRIPTS and not script.expanduser().is_file():
        raise ConfigError(
            f"--agent-command {command}: no file {script} in {Path.cwd()}; give its path from here, or an absolute one"
        )


def task_object(task: EpisodeTask, *, with_ground_truth: bool, truth_columns: Collection[str]) -> dict[str, Any]:
    """Return what an agent is told.

    Args:
        task: of the episode.
        with_ground_truth: tell the ground truth too.
        truth_columns: names of the columns that may hold it.
    """
    columns = {name: value for name, value in task.columns.items() if with_ground_truth or name not in truth_columns}
    told = {
        "uid": task.uid,
        "episode": task.episode,
        "purpose": task.purpose,
        "seed": task.seed,
        "messages": list(task.messages),
        "columns": columns,
    }
    return told | ({"ground_truth": task.ground_truth} if with_ground_truth else {})


def write_task(told: Mapping[str, Any], path: Path) -> None:
    """Write the task as a new file that this user alone may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(told, file)


def agent_variables(base: Mapping[str, str], *, url: str, token: str, task: Path) -> dict[str, str]:
    """Return the environment of an agent's process.

    Args:
        base: of the producer.
        url: of the episode, which ends in /v1.
        token: of the episode.
        task: the file with the task.
    """
    kept = {name: value for name, value in base.items() if not name.startswith(_WITHHELD)}
    for name in ("NO_PROXY", "no_proxy"):  # the gateway is on this machine, whatever proxy there is
        kept[name] = ",".join(filter(None, (kept.get(name, ""), _LOOPBACK)))
    return kept | {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": token,
        "COATI_TASK": str(task),
        "COATI_REWARD_URL": f"{url.removesuffix('/v1')}/reward",
    }
