"""Test the tool that runs the policy's Python: what it reads, what makes a sample invalid, many episodes at once."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import psutil
import pytest

from coati_rl.sandbox import Limits
from producer.environments.episode import EpisodeFailure
from producer.tools.call_formats import ToolCall
from producer.tools.python_tool import PythonKit
from producer.tools.tool import Schema, Tool, make_schema
from producer.tools.toolbox import MAX_RESULT, OpenTools, Toolbox
from tests.integration.sandbox.running import own_processes

MIB = 1 << 20
LIMITS = Limits(cpu_s=1.0, memory_bytes=256 * MIB, output_bytes=MIB)


@pytest.fixture
def toolbox() -> Iterator[Toolbox]:
    before = own_processes()
    box = Toolbox([PythonKit(limits=LIMITS)], timeout_s=60.0)
    yield box
    box.close()
    assert own_processes() == before


async def results(tools: OpenTools, *codes: str) -> list[str]:
    calls = [ToolCall(name="python", arguments={"code": code}, id=f"{n}") for n, code in enumerate(codes)]
    return [result.message["content"] for result in await tools.run(calls)]


def play(toolbox: Toolbox, *episodes: Callable[[OpenTools], Awaitable[Any]]) -> list[Any]:
    """Run episodes at the same time; returns what each gives."""

    async def one(episode: Callable[[OpenTools], Awaitable[Any]]) -> Any:
        tools = toolbox.open()
        try:
            return await episode(tools)
        finally:
            await tools.close()

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(one, episodes), return_exceptions=True)

    return asyncio.run(all_of_them())


def test_calls_of_one_answer_run_one_after_another(toolbox: Toolbox) -> None:
    (found,) = play(toolbox, lambda tools: results(tools, "x = 1", "x += 1\nx", "print(x)\nx + 1", ""))
    assert found == ["(no output)", "2", "2\n3", "(no output)"]


def test_what_a_program_does_wrong_is_read_by_the_policy(toolbox: Toolbox) -> None:
    (found,) = play(
        toolbox, lambda tools: results(tools, "x = 1", "1 / 0", "while True: pass", "x", "import os; os.abort()")
    )
    assert found[1].endswith("ZeroDivisionError: division by zero")
    assert found[2] == "The interpreter has ended, and its variables are lost: more than 1 s of CPU time."
    assert found[3].endswith("NameError: name 'x' is not defined")
    assert found[4] == "The interpreter has ended, and its variables are lost: killed by signal 11."


def test_megabytes_are_cut_with_a_note(toolbox: Toolbox) -> None:
    (found,) = play(toolbox, lambda tools: results(tools, "print('x' * 900_000)", "print('x' * 9_000_000)"))
    assert "characters are left out]" in found[0]
    assert all(len(text) < MAX_RESULT + 100 for text in found)
    assert found[1].endswith("OSError: [Errno 27] File too large")


def test_a_sandbox_that_is_killed_makes_its_sample_invalid_and_no_other(toolbox: Toolbox) -> None:
    others = own_processes()

    async def killed(tools: OpenTools) -> Any:
        await results(tools, "x = 1")
        for process in [psutil.Process(pid) for pid in own_processes() if pid not in others]:
            with suppress(psutil.NoSuchProcess):  # it has ended with the one before
                process.send_signal(signal.SIGKILL)
        return await results(tools, "x")

    (failure,) = play(toolbox, killed)
    assert isinstance(failure, EpisodeFailure)
    assert "the tool python is broken: python: the sandbox does not answer" in str(failure)
    assert play(toolbox, lambda tools: results(tools, "3")) == [["3"]]


def test_an_episode_that_is_given_up_in_a_call_leaves_nothing(toolbox: Toolbox) -> None:
    async def given_up(tools: OpenTools) -> Any:
        return await asyncio.wait_for(results(tools, "import time; time.sleep(100)"), 0.3)

    found = play(toolbox, given_up, lambda tools: results(tools, "3"))
    assert isinstance(found[0], TimeoutError)
    assert found[1] == ["3"]


class BrokenKit:
    """A tool that is always broken."""

    schema: Schema = make_schema("broken", "Break.")
    schemas = (schema,)

    def open(self) -> Sequence[Tool]:
        return (self,)

    async def call(self, arguments: dict[str, Any]) -> str:
        raise EpisodeFailure("it is broken")

    async def close(self) -> None:  # of the episode; the toolbox closes its kit alone here
        pass


@pytest.mark.parametrize("is_answer_over", [True, False])
def test_an_episode_that_ends_before_its_call_has_a_thread_keeps_no_sandbox(is_answer_over: bool) -> None:
    before = own_processes()
    kit, gate = PythonKit(limits=LIMITS), threading.Event()
    for _ in range(kit.threads._max_workers):
        kit.threads.submit(gate.wait)
    tools = OpenTools([*kit.open(), BrokenKit()], timeout_s=60.0)
    calls = [
        ToolCall(name="python", arguments={"code": "x = 1"}, id="0"),
        ToolCall(name="broken", arguments={}, id="1"),
    ]

    async def episode() -> None:
        if is_answer_over:
            with pytest.raises(EpisodeFailure, match="it is broken"):
                await tools.run(calls)
            waiting = None
        else:  # nobody cancels the call
            waiting = asyncio.ensure_future(tools.run(calls[:1]))
            await asyncio.sleep(0.1)
        asyncio.get_running_loop().call_later(0.2, gate.set)
        await tools.close()
        if waiting is not None:
            with pytest.raises(EpisodeFailure, match="the episode is over"):
                await waiting

    try:
        asyncio.run(episode())
        assert kit._idle == kit._all
    finally:
        kit.close()
    assert own_processes() == before


def test_tools_that_are_closed_in_a_call_end_it() -> None:
    before = own_processes()
    box = Toolbox([PythonKit()], timeout_s=60.0)

    async def closed() -> Any:
        call = asyncio.ensure_future(results(box.open(), "import time; time.sleep(100)"))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(box.close)
        return await asyncio.gather(call, return_exceptions=True)

    begin = time.monotonic()
    (failure,) = asyncio.run(closed())
    assert isinstance(failure, EpisodeFailure)
    assert time.monotonic() - begin < 20
    assert own_processes() == before


def test_episodes_use_sandboxes_again(toolbox: Toolbox) -> None:
    for number in range(3):
        assert play(toolbox, *[lambda tools, n=n: results(tools, f"x = {n}", "x") for n in range(2)]) == [
            ["(no output)", "0"],
            ["(no output)", "1"],
        ]
        if number == 0:
            processes = own_processes()
    assert own_processes() == processes


def own_memory(pid: int) -> int:
    """Bytes of a process that it shares with no other; 0 of one that has ended, as episodes end one by one."""
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.NoSuchProcess:
        return 0


@pytest.mark.full
def test_64_episodes_keep_their_own_variables_within_their_memory(toolbox: Toolbox) -> None:
    others = own_processes()
    most = [0.0]

    async def episode(tools: OpenTools, number: int) -> list[str]:
        found = await results(tools, f"x = {number}\nkept = bytearray(8 << 20)\nopen('f', 'w').write(str(x))")
        for _ in range(3):
            await asyncio.sleep(0)
            found += await results(tools, "x += 100\nx")
        memory = sum(own_memory(pid) for pid in own_processes() if pid not in others)
        most[0] = max(most[0], memory / MIB)
        return [*found, *await results(tools, "open('f').read()", "bytearray(1 << 30)")]

    found = play(toolbox, *[lambda tools, n=n: episode(tools, n) for n in range(64)])
    for number, texts in enumerate(found):
        assert texts[1:5] == [str(number + 100), str(number + 200), str(number + 300), repr(str(number))]
        assert texts[5].endswith("MemoryError")
    assert most[0] < 64 * 40, f"{most[0]:.0f} MiB"
    assert len(own_processes()) - len(others) <= 64 * 2  # bubblewrap and supervisor of each, no child
    assert os.getpid() not in own_processes()
