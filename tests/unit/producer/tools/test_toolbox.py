"""Test how calls are run: what is a result, what the policy reads as an error, and what makes a sample invalid."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from coati_rl.config.environment import EnvironmentConfig
from coati_rl.errors import ConfigError
from producer.environments.episode import EpisodeFailure
from producer.tools.call_formats import ToolCall
from producer.tools.python_tool import limits_within
from producer.tools.tool import ToolError, check_arguments
from producer.tools.toolbox import Toolbox, make_toolbox, shortened

OWN = '''
"""Functions of the user's."""
import asyncio, time
from producer.environments.episode import EpisodeFailure

def search(query: str, limit: int = 3) -> list[str]:
    """Search the library.

    Args:
        query: what to look for.
        limit: of the results.
    """
    return [query.upper()] * limit

def largest(numbers: list[int]) -> int:
    """Find the largest number.

    Args:
        numbers: at least one.
    """
    numbers.sort()
    return numbers.pop()

async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: for how long.
    """
    await asyncio.sleep(seconds)
    return "waited"

def sleep(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: for how long.
    """
    time.sleep(seconds)
    return "slept"

def fail(kind: str) -> str:
    """Fail.

    Args:
        kind: of error.
    """
    raise {"value": ValueError("wrong"), "connection": ConnectionRefusedError("down"), "exit": SystemExit(3),
        "stop": StopIteration(), "broken": EpisodeFailure("gone")}[kind]

async def leave(code: int) -> str:
    """Leave.

    Args:
        code: of the exit.
    """
    raise SystemExit(code)

def untyped(x):
    """Have no types."""

not_a_function = 3
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return str(tmp_path / "own.py")


def make(*names: str, timeout_s: float = 60.0, **changes: Any) -> Toolbox:
    config = EnvironmentConfig(tools=list(names), env_timeout=timeout_s / 0.8, **changes)
    return make_toolbox(config, is_isolated=True)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id="abcdefghi")


def run(toolbox: Toolbox, *calls: ToolCall) -> list[str]:
    async def results() -> list[str]:
        tools = toolbox.open()
        try:
            return [result.message["content"] for result in await tools.run(calls)]
        finally:
            await tools.close()

    return asyncio.run(results())


def test_the_schema_of_an_own_function_comes_from_its_signature_and_docstring(own: str) -> None:
    (schema,) = make(f"{own}:search").schemas
    assert schema["function"]["name"] == "search"
    assert schema["function"]["description"] == "Search the library."
    assert schema["function"]["parameters"]["properties"] == {
        "query": {"type": "string", "description": "what to look for."},
        "limit": {"type": "integer", "description": "of the results."},
    }
    assert schema["function"]["parameters"]["required"] == ["query"]


def test_calls_are_answered_in_order_by_messages_of_the_role_tool(own: str) -> None:
    async def results() -> Any:
        return (
            await make("calculator", f"{own}:search")
            .open()
            .run([call("calculator", expression="1+1"), call("search", query="é")])
        )

    first, second = asyncio.run(results())
    assert first.message == {"role": "tool", "tool_call_id": "abcdefghi", "name": "calculator", "content": "2"}
    assert second.message["content"] == '["É", "É", "É"]'
    assert (second.record["name"], second.record["is_error"]) == ("search", False)


def test_a_function_that_changes_its_arguments_leaves_the_call_as_it_was_written(own: str) -> None:
    written = call("largest", numbers=[3, 9, 1])
    assert run(make(f"{own}:largest"), written) == ["9"]
    assert written.arguments == {"numbers": [3, 9, 1]}


def test_calls_of_one_answer_run_at_the_same_time(own: str) -> None:
    begin = time.monotonic()
    toolbox = make(f"{own}:wait", f"{own}:sleep")
    assert run(toolbox, *[call(name, seconds=1) for name in ("wait", "sleep") * 4]) == ["waited", "slept"] * 4
    assert time.monotonic() - begin < 7  # 8 s one after another


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (call("nope"), "Error: there is no tool nope; the tools are calculator, search, fail, leave"),
        (call("search"), "Error: search takes query (string), limit (integer): query is missing"),
        (
            call("search", query=3, x=1),
            "Error: search takes query (string), limit (integer): it has no x, query must be of the type string",
        ),
        (call("search", query="a", limit=True), "Error: search takes query (string), limit (integer): limit must be"),
        (call("calculator", expression="1/0"), "Error: division by zero"),
        (call("fail", kind="value"), "Error: ValueError: wrong"),
        (call("fail", kind="nope"), "Error: KeyError: 'nope'"),
        (call("fail", kind="exit"), "Error: RuntimeError: SystemExit(3)"),
        (call("fail", kind="stop"), "Error: RuntimeError: StopIteration()"),
        (call("leave", code=3), "Error: RuntimeError: SystemExit(3)"),
    ],
)
def test_what_the_policy_does_wrong_is_read_by_it_and_harms_no_other_call(own: str, wrong: ToolCall, text: str) -> None:
    toolbox = make("calculator", f"{own}:search", f"{own}:fail", f"{own}:leave")
    found, other = run(toolbox, wrong, call("calculator", expression="2"))
    assert found.startswith(text)
    assert other == "2"


@pytest.mark.parametrize(("kind", "text"), [("connection", "ConnectionRefusedError: down"), ("broken", "gone")])
def test_a_tool_that_is_broken_makes_the_sample_invalid(own: str, kind: str, text: str) -> None:
    with pytest.raises(EpisodeFailure, match=f"the tool fail is broken: {text}"):
        run(make(f"{own}:fail"), call("fail", kind=kind))


def test_the_calls_beside_one_that_breaks_are_cancelled(own: str) -> None:
    async def left() -> set[Any]:
        tools = make(f"{own}:wait", f"{own}:fail").open()
        with pytest.raises(EpisodeFailure, match="gone"):
            await tools.run([call("wait", seconds=600), call("fail", kind="broken")])
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(left()) == set()


@pytest.mark.parametrize("name", ["wait", "sleep"])
def test_a_tool_that_hangs_makes_the_sample_invalid_and_holds_nothing_up(own: str, name: str) -> None:
    toolbox = make(f"{own}:{name}", timeout_s=0.2)
    begin = time.monotonic()
    with pytest.raises(EpisodeFailure, match=f"the tool {name} took longer than 0.2 s"):
        run(toolbox, call(name, seconds=30))
    assert run(toolbox, call(name, seconds=0))[0] in ("waited", "slept")
    assert time.monotonic() - begin < 15
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tool")


def test_megabytes_are_cut_with_a_note() -> None:
    text = shortened("a" * 5_000_000 + "z")
    assert len(text) < 8300
    assert "\n[4991809 characters are left out]\n" in text
    assert text.startswith("aaa")
    assert text.endswith("az")
    assert shortened("x" * 8192) == "x" * 8192
    assert shortened("a\ud800b") == "a?b"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("FILE:untyped",), "give each argument a type"),
        (("FILE:missing",), "has no function 'missing'"),
        (("FILE:search", "OTHER:search"), "two tools have the name search"),
    ],
)
def test_tools_that_cannot_be_offered_are_refused(
    own: str, tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    other = tmp_path / "other.py"
    other.write_text(OWN, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        make(*(name.replace("FILE", own).replace("OTHER", str(other)) for name in names))


@pytest.mark.parametrize(
    ("schema", "arguments", "is_right"),
    [
        ({"a": {"type": ["integer", "null"]}}, {"a": None}, True),
        ({"a": {"type": ["integer", "null"]}}, {"a": "x"}, False),
        ({"a": {"type": "integer"}}, {"a": 3.0}, True),
        ({"a": {"type": "number"}}, {"a": 3}, True),
        ({"a": {"type": "number"}}, {"a": True}, False),
        ({"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, {"a": None}, True),
        ({"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, {"a": "x"}, False),
        ({"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Day"}]}}, {"a": 3}, True),  # for the tool to check
        ({"a": True}, {"a": 3}, True),
        ({}, {"a": 3}, False),
    ],
)
def test_types_of_arguments(schema: dict[str, Any], arguments: dict[str, Any], is_right: bool) -> None:
    described = {"function": {"name": "f", "parameters": {"properties": schema}}}
    if is_right:
        check_arguments(described, arguments)
    else:
        with pytest.raises(ToolError, match="f takes"):
            check_arguments(described, arguments)


@pytest.mark.parametrize(("timeout_s", "cpu_s", "wall_s"), [(48.0, 5.0, 43.2), (4.0, 1.0, 3.6)])
def test_endless_code_reaches_its_own_limit_before_the_turn_does(timeout_s: float, cpu_s: float, wall_s: float) -> None:
    limits = limits_within(timeout_s)
    assert (limits.cpu_s, limits.most_wall_s) == (cpu_s, wall_s)
    assert limits.starved_s < timeout_s
