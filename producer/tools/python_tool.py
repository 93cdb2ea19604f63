"""Run the policy's Python code in a sandbox: an interpreter for each episode, which keeps its variables between calls.

In: code. Out: what it prints, the value of an expression at its end, its error. The interpreter begins with the first
call of an episode and ends with the episode; its sandbox is used again by later episodes, which find nothing of it.
"""

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.sandbox import Limits, Outcome, PythonSession, Sandbox, SandboxError
from producer.environments.episode import EpisodeFailure
from producer.tools.tool import Schema, Tool, make_schema

MIB = 1 << 20
CALL_LIMITS = Limits(cpu_s=5.0, memory_bytes=512 * MIB, output_bytes=MIB, disk_bytes=16 * MIB, num_files=200)
_CALLS_PER_CORE = 4  # at a time; most wait for something, and those that do not share the cores


def limits_within(timeout_s: float) -> Limits:
    """Return the limits of a call that must not take longer: an endless one is to reach the limit of its CPU time."""
    return replace(CALL_LIMITS, cpu_s=min(CALL_LIMITS.cpu_s, timeout_s / 4), most_wall_s=0.9 * timeout_s)


class PythonKit:
    """Implement `ToolKit` with a sandbox for each episode that calls the tool.

    Args:
        is_isolated: see `Sandbox`.
        limits: of each call; a call that reaches one has failed.
    """

    def __init__(self, *, is_isolated: bool = True, limits: Limits = CALL_LIMITS) -> None:
        self.limits = limits
        # A sandbox ends with the thread that has started it, and these live as long as this object.
        self.threads = ThreadPoolExecutor(_CALLS_PER_CORE * (os.cpu_count() or 1), thread_name_prefix="python tool")
        self.is_closing = False
        self._is_isolated = is_isolated
        self._lock = threading.Lock()
        self._idle: list[Sandbox] = []
        self._all: list[Sandbox] = []

    @property
    def schemas(self) -> Sequence[Schema]:
        return (PythonTool.schema,)

    def open(self) -> Sequence[Tool]:
        return [PythonTool(self)]

    def take(self) -> Sandbox:
        """Return a sandbox that no episode uses."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._all.append(Sandbox(is_isolated=self._is_isolated))
            return self._all[-1]

    def give_back(self, sandbox: Sandbox) -> None:
        """Let other episodes use a sandbox."""
        with self._lock:
            self._idle.append(sandbox)

    def close(self) -> None:
        """See `ToolKit.close`: calls that run end with an error."""
        self.is_closing = True
        with self._lock:
            sandboxes = tuple(self._all)
        for sandbox in sandboxes:
            sandbox.interrupt()
        self.threads.shutdown(cancel_futures=True)
        for sandbox in self._all:
            sandbox.close()


class PythonTool:
    """Implement `Tool` for one episode."""

    schema: Schema = make_schema(
        "python",
        "Run Python code. Variables are kept between calls; print what you want to see.",
        code="The code to run. The value of an expression at its end is printed.",
    )

    def __init__(self, kit: PythonKit) -> None:
        self._kit = kit
        self._turn = asyncio.Lock()  # calls of one answer come at the same time, and run one after another
        self._lock = threading.Lock()  # a call that was given up may still run
        self._sandbox: Sandbox | None = None
        self._session: PythonSession | None = None
        self._is_used = False  # a call has begun, or waits for a thread
        self._is_closed = False

    async def call(self, arguments: dict[str, Any]) -> str:
        async with self._turn:
            self._is_used = True
            return await asyncio.get_running_loop().run_in_executor(self._kit.threads, self._run, arguments["code"])

    async def close(self) -> None:
        """See `Tool.close`; a call that runs is waited for."""
        self._is_closed = True
        if self._is_used:
            await asyncio.get_running_loop().run_in_executor(self._kit.threads, self._end)

    def _run(self, code: str) -> str:
        with self._lock:
            if self._is_closed:
                raise EpisodeFailure("python: the episode is over")
            if self._session is None:
                self._sandbox = self._kit.take()
                self._session = PythonSession(self._sandbox, self._kit.limits)
            try:
                self._session.open()
                if self._kit.is_closing:  # else it is closed in the call, which then fails
                    raise EpisodeFailure("python: the run ends")
                outcome = self._session.call(code)
            except (SandboxError, ConfigError, OSError) as error:
                raise EpisodeFailure(f"python: {error}") from error
            if outcome.end == "starved":
                raise EpisodeFailure(f"python: {outcome.explain(self._kit.limits)}")
            return _shown(outcome, self._kit.limits, is_lost=not self._session.is_open)

    def _end(self) -> None:
        with self._lock:
            session, sandbox = self._session, self._sandbox
            if session is not None and sandbox is not None:
                with suppress(SandboxError):  # it has ended, and begins anew with its next program
                    session.close()
                self._kit.give_back(sandbox)
                self._session = self._sandbox = None


def _shown(outcome: Outcome, limits: Limits, *, is_lost: bool) -> str:
    parts = [part.decode(errors="replace").rstrip("\n") for part in (outcome.output, outcome.error_output)]
    if is_lost:
        parts.append(f"The interpreter has ended, and its variables are lost: {outcome.explain(limits)}.")
    return "\n".join(part for part in parts if part) or "(no output)"
