"""Test tools of MCP servers over stdio, with the real client: calls, faults, and what is left."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from coati_rl.config.environment import EnvironmentConfig
from coati_rl.errors import ConfigError
from producer.environments.episode import EpisodeFailure
from producer.tools.call_formats import ToolCall
from producer.tools.mcp_server import McpServer
from producer.tools.toolbox import Toolbox, make_toolbox

ECHO = f"{sys.executable} -S {Path(__file__).with_name('mcp_echo_server.py')}"
OF_THE_PACKAGE = '''
from mcp.server.mcpserver import MCPServer
server = MCPServer("adder")
@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
@server.tool()
def divide(a: int, b: int) -> float:
    """Divide."""
    return a / b
server.run()
'''


def own_processes() -> list[int]:
    return [process.pid for process in psutil.Process().children(recursive=True)]


@pytest.fixture
def toolbox() -> Iterator[Toolbox]:
    before = own_processes()
    box = Toolbox([McpServer(ECHO, timeout_s=1.0)], timeout_s=20.0)
    yield box
    box.close()
    assert own_processes() == before


def run(toolbox: Toolbox, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """Run each call in an episode of its own, at the same time. Returns: texts, and what was raised."""

    async def one(name: str, arguments: dict[str, Any]) -> str:
        tools = toolbox.open()
        try:
            (result,) = await tools.run([ToolCall(name=name, arguments=arguments, id="x")])
            return str(result.message["content"])
        finally:
            await tools.close()

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(one(*call) for call in calls), return_exceptions=True)

    return asyncio.run(all_of_them())


@pytest.mark.full
def test_tools_are_listed_and_called_by_many_episodes_at_once(toolbox: Toolbox) -> None:
    assert toolbox.schemas[0]["function"] == {
        "name": "add",
        "description": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
    assert run(toolbox, *[("add", {"a": n, "b": 1}) for n in range(64)]) == [str(n + 1) for n in range(64)]


def test_a_call_that_fails_is_read_by_the_policy_and_megabytes_are_cut(toolbox: Toolbox) -> None:
    failed, wrong, large = run(toolbox, ("fail", {}), ("add", {"a": "x"}), ("megabytes", {}))
    assert failed == "Error: it failed"
    assert wrong.startswith("Error: add takes a (integer), b (integer): b is missing, a must be of the type integer")
    assert "[4186112 characters are left out]" in large


@pytest.mark.parametrize(
    ("name", "arguments", "cause"),
    [("die", {}, "Connection closed"), ("hang", {"seconds": 60}, "timed out"), ("garbage", {}, "")],
)
def test_a_server_that_dies_hangs_or_writes_garbage_makes_the_sample_invalid_and_serves_the_next(
    toolbox: Toolbox, name: str, arguments: dict[str, Any], cause: str
) -> None:
    (before,) = run(toolbox, ("process", {}))
    (failure,) = run(toolbox, (name, arguments))
    assert isinstance(failure, EpisodeFailure)
    assert f"the tool {name} is broken: {ECHO}: " in str(failure)
    assert cause in str(failure)
    (after,) = run(toolbox, ("process", {}))
    assert after.isdigit()
    assert after != before
    assert not psutil.pid_exists(int(before))


@contextmanager
def made_by_flags(command: str, *, call_s: float) -> Iterator[Toolbox]:
    before = own_processes()
    box = make_toolbox(EnvironmentConfig(mcp_server=[command], env_timeout=call_s / 0.8), is_isolated=True)
    try:
        yield box
    finally:
        box.close()
    assert own_processes() == before


def process_that_answers(toolbox: Toolbox) -> str:
    """The server's process, when it answers within a call's time limit."""
    deadline = time.monotonic() + 60
    while True:
        (found,) = run(toolbox, ("process", {}))
        if isinstance(found, str):
            return found
        assert isinstance(found, EpisodeFailure) and time.monotonic() < deadline


def test_a_server_that_hangs_is_replaced_also_when_the_turn_is_over_before_its_check() -> None:
    with made_by_flags(ECHO, call_s=1.0) as toolbox:
        before = process_that_answers(toolbox)
        (failure,) = run(toolbox, ("hang", {"seconds": 600}))
        assert isinstance(failure, EpisodeFailure)
        assert process_that_answers(toolbox) != before
        assert not psutil.pid_exists(int(before))


def test_a_server_whose_start_takes_longer_than_a_call_is_started_once_and_serves_later_calls(tmp_path: Path) -> None:
    others, may_start = own_processes(), tmp_path / "may-start"
    may_start.touch()
    with made_by_flags(f"sh -c 'until [ -e {may_start} ]; do sleep 0.1; done; exec {ECHO}'", call_s=0.5) as toolbox:
        before = process_that_answers(toolbox)
        may_start.unlink()
        (failure,) = run(toolbox, ("die", {}))
        assert isinstance(failure, EpisodeFailure)
        (late,) = run(toolbox, ("process", {}))
        assert isinstance(late, EpisodeFailure) and "the tool process took longer than 0.5 s" in str(late)
        may_start.touch()
        after = process_that_answers(toolbox)
        assert after != before
        assert [pid for pid in own_processes() if pid not in others] == [int(after)]


@pytest.mark.parametrize("code", [-32602, -32603, -32601, -32000, 7])
def test_an_error_of_the_protocol_is_read_by_the_policy_and_the_server_goes_on(toolbox: Toolbox, code: int) -> None:
    (before,) = run(toolbox, ("process", {}))
    assert run(toolbox, ("refuse", {"code": code})) == ["Error: it is refused"]
    assert run(toolbox, ("process", {})) == [before]


def test_a_server_that_was_killed_between_calls_is_started_again(toolbox: Toolbox) -> None:
    (before,) = run(toolbox, ("process", {}))
    process = psutil.Process(int(before))
    process.kill()
    psutil.wait_procs([process], timeout=10)
    found = [*run(toolbox, ("add", {"a": 1, "b": 2})), *run(toolbox, ("add", {"a": 1, "b": 2}))]
    assert found[-1] == "3"
    assert isinstance(found[0], EpisodeFailure) or found[0] == "3"


@pytest.mark.parametrize("command", ["no-such-command --at-all", "true", f"{sys.executable} -c 'print(1)'"])
def test_a_command_that_is_no_server_is_refused_and_leaves_nothing(command: str) -> None:
    before = own_processes()
    with pytest.raises(ConfigError, match=f"--mcp-server {command.split()[0]}.*: the server does not start: "):
        McpServer(command, timeout_s=1.0)
    assert own_processes() == before


@pytest.mark.full
def test_a_server_of_the_package_s_own(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(OF_THE_PACKAGE, encoding="utf-8")
    toolbox = Toolbox([McpServer(f"{sys.executable} {tmp_path / 'server.py'}", timeout_s=20.0)], timeout_s=30.0)
    try:
        found = run(toolbox, ("add", {"a": 2, "b": 3}), ("divide", {"a": 1, "b": 0}))
        assert found[0] == "5"
        assert found[1].startswith("Error: Error executing tool divide")
    finally:
        toolbox.close()
