"""Run each of a user's episodes in a process of its own: the side of these processes.

A server imports the user's file and forks a process for each episode, in milliseconds. It is a fresh interpreter with
one thread, not a fork of the producer, which has an engine's. As the parent it also kills the processes, with all that
they have started, and collects them, so that a reused process id is never signalled.

The producer sends the server {"start" | "kill": number}, "start" with the episode's socket attached. The server sends
{"ready": true}, or {"error": cause} and ends; it ends, with all processes, when its socket is closed. An episode reads
lines {"call": "reset" | "step" | "truncated" | "close", "argument": ...} and writes a line {"returned": ...} or
{"failure": cause} for each, after an empty one as it begins. All is JSON.
"""

import asyncio
import gc
import inspect
import json
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

import psutil

from coati_rl.errors import ConfigError
from coati_rl.processes.ending import adopt_orphans, end_with_parent
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.episode import Action, Episode, EpisodeFailure, EpisodeTask
from producer.environments.episode_host import failure_of
from producer.environments.own_episode import episode_factory
from producer.environments.returned_steps import as_rewards, as_start, as_step

BODY = "from producer.environments.episode_process import main; main()"
CLASS_VARIABLE = "COATI_EPISODE_CLASS"  # [FILE.py:CLASS, its arguments by name, the run's limits or null], as JSON
_COLLECT_S = 0.01  # between two looks at killed processes that have not ended


def main() -> None:
    """Run the server; its socket and the parent's process id are in argv."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    name, arguments, limits_given = json.loads(os.environ[CLASS_VARIABLE])
    limits = limits_given and RunLimits(**limits_given)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with_parent(int(sys.argv[2]))
    adopt_orphans()  # what an episode's processes leave behind comes here
    control = socket.socket(fileno=int(sys.argv[1]))
    factory: Callable[[], Episode] | None = None
    if sys.argv[3] == "import":
        try:
            factory = episode_factory(name, arguments, limits).make
        except ConfigError as error:
            control.send(json.dumps({"error": str(error)}).encode())
            return
        if len(os.listdir("/proc/self/task")) > 1:  # a fork would lack them
            logging.warning("%s starts threads when it is imported: each episode's process imports it by itself", name)
            sys.stderr.flush()
            os.execv(sys.executable, [sys.executable, "-P", "-c", BODY, *sys.argv[1:3], "leave it to the episodes"])
    gc.collect()
    gc.freeze()  # pages stay shared with the processes
    control.send(json.dumps({"ready": True}).encode())
    _Server(control, lambda: (factory or episode_factory(name, arguments, limits).make)()).serve()


class _Server:
    """Fork, kill and collect the processes of episodes."""

    def __init__(self, control: socket.socket, make_episode: Callable[[], Episode]) -> None:
        self._control = control
        self._make_episode = make_episode
        self._pids: dict[int, int] = {}  # by number
        self._killed: set[int] = set()  # process ids that have not been collected yet

    def serve(self) -> None:
        """Execute requests until the producer closes its end, then end all processes."""
        while True:
            has_message, _, _ = select.select([self._control], [], [], _COLLECT_S if self._killed else None)
            self._collect()
            if not has_message:
                continue
            message, descriptors, _, _ = socket.recv_fds(self._control, 1024, 1)
            if not message:
                break
            ((command, number),) = json.loads(message).items()
            if command == "start":
                self._start(number, socket.socket(fileno=descriptors[0]))
            elif number in self._pids:
                self._kill(self._pids[number])
        while children := psutil.Process().children(recursive=True):
            for process in children:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._collect()

    def _collect(self) -> None:
        """Collect the processes that have ended, after killing what they have left."""
        num_collected = 0
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                pid = ended.si_pid  # of a zombie, so that no other process can have it
                if pid in self._pids.values():
                    _kill(pid)
                    self._pids = {number: each for number, each in self._pids.items() if each != pid}
                os.waitpid(pid, 0)
                self._killed.discard(pid)
                num_collected += 1
        if num_collected:  # what they have left, also in sessions of its own, is a child of this process now
            for child in psutil.Process().children():
                if child.pid not in self._pids.values():
                    self._kill(child.pid)

    def _kill(self, pid: int) -> None:
        _kill(pid)
        self._killed.add(pid)

    def _start(self, number: int, sock: socket.socket) -> None:
        sock.set_inheritable(False)  # what an episode starts must not get it
        with sock:
            parent_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._become_episode(parent_pid, sock)
            with suppress(OSError):
                os.setpgid(pid, pid)  # also called in the process, since either may be first
            self._pids[number] = pid

    def _become_episode(self, parent_pid: int, sock: socket.socket) -> NoReturn:
        exit_code = 1
        try:
            self._control.close()
            os.setpgid(0, 0)
            end_with_parent(parent_pid)
            adopt_orphans()  # daemons that it starts stay below it
            serve_episode(self._make_episode, sock)
            exit_code = 0
        except BaseException:  # a fork must not return into the loop of `serve`
            logging.exception("an episode's process ended")
            sys.stderr.flush()
        finally:
            os._exit(exit_code)


def serve_episode(make_episode: Callable[[], Episode], sock: socket.socket) -> None:
    """Answer calls until the producer closes its end."""
    episode: Episode | None = None
    with asyncio.Runner() as runner, suppress(OSError), sock.makefile("rb") as lines:
        sock.sendall(b"{}\n")
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


def _kill(pid: int) -> None:
    """Kill an episode's process, which is not collected yet, its process group and its descendants."""
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(pid).children(recursive=True)
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.kill()
