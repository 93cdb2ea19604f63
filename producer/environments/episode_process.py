"""Run each of a user's episodes in a process of its own: the side of these processes.

A fork server (`coati_rl/processes/fork_server.py`) imports the user's file and forks a process for each episode, which
reads lines {"call": "reset" | "step" | "truncated" | "close", "argument": ...} and writes a line {"returned": ...} or
{"failure": cause} for each, after an empty one as it begins.
"""

import asyncio
import inspect
import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from coati_rl.processes import fork_server
from producer.environments.compatible.forms import AgentForm
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.episode import Action, Episode, EpisodeFailure, EpisodeTask
from producer.environments.episode_host import failure_of
from producer.environments.own_episode import episode_factory
from producer.environments.returned_steps import as_rewards, as_start, as_step

BODY = "from producer.environments.episode_process import main; main()"
BEGUN = b"{}\n"  # the line of a process that has started
CLASS_VARIABLE = "COATI_EPISODE_CLASS"  # [FILE.py:CLASS, its arguments by name, the run's limits or null], as JSON


def main() -> None:
    """Run the server."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    name, arguments, limits_given = json.loads(os.environ[CLASS_VARIABLE])
    limits = limits_given and RunLimits(**limits_given)
    fork_server.serve(BODY, lambda: episode_factory(name, arguments, limits), _run, keeps_orphans=True)


def _run(factory: Callable[[], AgentForm], sock: socket.socket) -> None:
    serve_episode(lambda: factory().make(), sock)


def serve_episode(make_episode: Callable[[], Episode], sock: socket.socket) -> None:
    """Answer calls until the producer closes its end."""
    episode: Episode | None = None
    with asyncio.Runner() as runner, suppress(OSError), sock.makefile("rb") as lines:
        sock.sendall(BEGUN)
        for line in lines:
            message = json.loads(line)
            name, argument = message["call"], message["argument"]
            try:
                if name == "reset":
                    episode = make_episode()
                answer: dict[str, Any] = {"returned": _call(episode, name, argument, runner)}
            except EpisodeFailure as error:
                answer = {"failure": str(error)}
            except BaseException as error:  # noqa: BLE001 - a user's code may raise SystemExit
                answer = {"failure": str(failure_of(name, error))}
            sock.sendall(json.dumps(answer).encode() + b"\n")


def _call(episode: Episode | None, name: str, argument: dict[str, Any], runner: asyncio.Runner) -> Any:
    """Call a method. Returns: what it returned, as JSON types. Raises: EpisodeFailure, and what the method raises."""
    method = getattr(episode, name, None)
    if name == "close":
        _finished(method() if callable(method) else None, runner)
        return None
    if name == "truncated":
        return as_rewards(_finished(method() if callable(method) else None, runner))
    if not callable(method):
        raise EpisodeFailure(f"{type(episode).__name__} has no method {name}")
    if name == "reset":
        task = EpisodeTask(**{**argument, "messages": tuple(argument["messages"])})
        return asdict(as_start(_finished(method(task), runner)))
    listed = {key: tuple(argument[key]) for key in ("token_ids", "messages")}
    return asdict(as_step(_finished(method(Action(**{**argument, **listed})), runner)))


def _finished(returned: Any, runner: asyncio.Runner) -> Any:
    async def result() -> Any:
        return await returned

    return runner.run(result()) if inspect.isawaitable(returned) else returned
