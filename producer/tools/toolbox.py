"""Hold the tools of a run: made from its flags, opened for each episode, called by name."""

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coati_rl.config.environment import EnvironmentConfig
from coati_rl.errors import ConfigError
from coati_rl.plugins import is_plugin
from coati_rl.sandbox import check_sandbox
from producer.environments.episode import EpisodeFailure, Message
from producer.tools.calculator import Calculator
from producer.tools.call_formats import ToolCall
from producer.tools.mcp_server import McpServer
from producer.tools.own_function import OwnFunction
from producer.tools.python_tool import PythonKit, limits_within
from producer.tools.tool import Schema, Tool, ToolError, ToolKit, check_arguments, name_of, typed_arguments

logger = logging.getLogger(__name__)

MAX_RESULT = 8192  # characters of a result that the policy reads
_SHARE_OF_TIME = 0.8  # of a turn's time limit that a call may take
_SHARE_OF_CALL = 0.9  # of that, which a server may take: it is looked after if it hangs


@dataclass(frozen=True, kw_only=True, slots=True)
class CallResult:
    """Hold what became of a call."""

    message: Message  # of the role tool
    record: dict[str, Any]  # JSON types, for the record of the rollout


class Toolbox:
    """Make the tools of each episode.

    Args:
        kits: whose tools have different names.
        timeout_s: for each call.
    Raises: ConfigError for two tools of one name; all kits are closed then.
    """

    def __init__(self, kits: Sequence[ToolKit], *, timeout_s: float) -> None:
        self._kits = tuple(kits)
        self._timeout_s = timeout_s
        names = [name_of(schema) for schema in self.schemas]
        if twice := next((name for name in names if names.count(name) > 1), None):
            self.close()
            raise ConfigError(f"--tools, --mcp-server: two tools have the name {twice}; leave one out")

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """Return the schemas of all tools, in the order in which they were given."""
        return tuple(schema for kit in self._kits for schema in kit.schemas)

    def open(self) -> "OpenTools":
        """Return the tools of a new episode. Raises: EpisodeFailure."""
        return OpenTools([tool for kit in self._kits for tool in kit.open()], timeout_s=self._timeout_s)

    def close(self) -> None:
        """End what runs for the tools."""
        for kit in self._kits:
            try:
                kit.close()
            except Exception:  # the others are closed, too
                logger.warning("%s was not closed", type(kit).__name__, exc_info=True)


class OpenTools:
    """Run the calls of one episode."""

    def __init__(self, tools: Sequence[Tool], *, timeout_s: float) -> None:
        self._tools = {name_of(tool.schema): tool for tool in tools}
        self._timeout_s = timeout_s

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tools."""
        return tuple(self._tools)

    async def run(self, calls: Sequence[ToolCall]) -> list[CallResult]:
        """Run the calls of one answer at the same time; if one cannot be answered, the others are cancelled.

        Returns: their results, in order. Raises: EpisodeFailure.
        """
        runs = [asyncio.ensure_future(self._run(call)) for call in calls]
        try:
            return await asyncio.gather(*runs)
        except BaseException:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            raise

    async def close(self) -> None:
        """Close all tools."""
        await asyncio.gather(*(tool.close() for tool in self._tools.values()))

    async def _run(self, call: ToolCall) -> CallResult:
        begin = time.perf_counter()
        is_error = False
        try:
            text = await self._result(call)
        except ToolError as error:
            text, is_error = f"Error: {error}", True
        content = shortened(text)
        return CallResult(
            message={"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content},
            record={"name": call.name, "is_error": is_error, "seconds": round(time.perf_counter() - begin, 6)},
        )

    async def _result(self, call: ToolCall) -> str:
        """Return the result of a call. Raises: ToolError; EpisodeFailure, also for a tool that takes too long."""
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name}; the tools are {', '.join(self._tools)}")
        # Copied: a function may change them, and the next context holds the call as the policy has written it.
        arguments = copy.deepcopy(typed_arguments(tool.schema, call.arguments))
        check_arguments(tool.schema, arguments)
        try:
            return await asyncio.wait_for(tool.call(arguments), self._timeout_s)
        except TimeoutError as error:
            raise EpisodeFailure(f"the tool {call.name} took longer than {self._timeout_s:g} s") from error
        except EpisodeFailure as error:
            raise EpisodeFailure(f"the tool {call.name} is broken: {error}") from error


def shortened(text: str, limit: int = MAX_RESULT) -> str:
    """Cut the middle out of a long result, with a note that says so. Characters that UTF-8 lacks are replaced."""
    if len(text) > limit:
        cut = len(text) - limit
        text = f"{text[: limit // 2]}\n[{cut} characters are left out]\n{text[len(text) - (limit - limit // 2) :]}"
    return text.encode(errors="replace").decode()


_BUILT_IN = ("calculator", "python")


def make_toolbox(config: EnvironmentConfig, *, is_isolated: bool) -> Toolbox:
    """Make the tools that flags name; MCP servers are started.

    Args:
        config: with --tools and --mcp-server.
        is_isolated: the python tool runs in a sandbox; False: with the user's rights.
    Raises: ConfigError.
    """
    timeout_s = config.env_timeout * _SHARE_OF_TIME
    makers: list[Callable[[], ToolKit]] = [
        _maker(name, timeout_s=timeout_s, is_isolated=is_isolated) for name in config.tools
    ]
    makers += [_server_maker(command, timeout_s=timeout_s) for command in config.mcp_server]
    kits: list[ToolKit] = []
    try:
        for make in makers:
            kits.append(make())
    except ConfigError:
        for kit in kits:
            kit.close()
        raise
    return Toolbox(kits, timeout_s=timeout_s)


def check_python_tool(config: EnvironmentConfig, *, is_isolated: bool) -> None:
    """Raise ConfigError if this machine has no sandbox for the python tool."""
    if "python" in config.tools and is_isolated:
        try:
            check_sandbox()
        except ConfigError as error:
            raise ConfigError(f"--tools python: {error}") from error


def _maker(name: str, *, timeout_s: float, is_isolated: bool) -> Callable[[], ToolKit]:
    if name == "calculator":
        return Calculator
    if name == "python":
        return lambda: PythonKit(is_isolated=is_isolated, limits=limits_within(timeout_s))
    if is_plugin(name):
        return lambda: OwnFunction(name)
    raise ConfigError(f"--tools {name}: use one of {', '.join(_BUILT_IN)}, or FILE.py:FUNCTION")


def _server_maker(command: str, *, timeout_s: float) -> Callable[[], ToolKit]:
    return lambda: McpServer(command, timeout_s=_SHARE_OF_CALL * timeout_s)
