"""Processes of agents: what comes of their ends, and that nothing of them is left, whatever ends them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from producer.gateway.agent_process import run_agent
from producer.gateway.agent_task import agent_variables
from tests.ended import has_ended

# Starts a child in a session of its own, which a signal to the process group does not reach, and writes its number.
SPAWN = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(os.environ["PIDS"], "a").write(f"{child.pid} {os.getpid()} ")
"""


@pytest.fixture
def run(tmp_path: Path):
    """Runs Python code as an agent; returns why it failed."""
    task = tmp_path / "task.json"
    task.write_text('{"uid": "u"}')

    def run(code: str, *, timeout_s: float = 20.0, command=None, errors=None) -> str | None:
        environment = {"PATH": os.environ["PATH"], "PIDS": str(tmp_path / "pids")}
        command = command or [sys.executable, "-S", "-c", code]
        return asyncio.run(run_agent(command, environment=environment, task=task, timeout_s=timeout_s, errors=errors))

    return run


def test_error_output_is_kept_whole_or_its_beginning_and_its_end(run, tmp_path) -> None:
    kept = tmp_path / "agents/p-0.txt"
    assert run("import sys; print('to nobody')", errors=kept) is None
    assert not kept.exists(), "nothing was written"
    assert run("import sys; print('one\\ntwo', file=sys.stderr); sys.exit(1)", errors=kept) == "exit code 1: two"
    assert kept.read_text() == "one\ntwo\n"
    run("import sys; sys.stderr.write('begin' + 'x' * 10**6 + 'end')", errors=kept)
    text = kept.read_text()
    assert len(text) < 66_000 and text.startswith("beginxxx") and text.endswith("xxxend")
    assert f"\n[... {10**6 + 8 - 65_536} bytes left out ...]\n" in text


def test_a_disk_that_is_full_costs_the_error_output_and_not_the_episode(run, tmp_path) -> None:
    (tmp_path / "p-0.txt").symlink_to("/dev/full")
    assert run("import sys; print('one', file=sys.stderr)", errors=tmp_path / "p-0.txt") is None


def alive(pids: Path) -> list[int]:
    """Which of the processes still run; a zombie does not."""
    found = [int(text) for text in pids.read_text().split()]
    assert len(found) >= 2
    return [pid for pid in found if not has_ended(pid)]


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("import json, sys; assert json.load(sys.stdin) == {'uid': 'u'}", None),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import sys; print('one\\ntwo  \\n', file=sys.stderr); sys.exit(1)", "exit code 1: two"),
        ("print('x' * 10**6); import os; os.kill(os.getpid(), 9)", "it was killed by SIGKILL"),
        ("import sys; sys.stderr.write('y' * 10**6)", None),
        ("import os; assert os.getpgid(0) == os.getpid() and 'HOME' not in os.environ", None),
    ],
)
def test_an_agent_that_does_not_end_well_fails_with_the_last_line_of_its_errors(run, code, failure) -> None:
    assert run(code) == failure


def test_a_command_that_cannot_be_run_is_a_failure(run) -> None:
    assert run("", command=["/no/such/program"]) == "exit code 127: /no/such/program: No such file or directory"


@pytest.mark.parametrize("end", ["", "sys.exit(2)", "os.kill(os.getpid(), 9)", "time.sleep(600)"])
def test_nothing_that_an_agent_has_started_outlives_it(run, tmp_path, end) -> None:
    begin = time.monotonic()
    failure = run(SPAWN + end, timeout_s=1.5 if "sleep" in end else 60)
    assert (failure is None) == (end == "")
    assert "sleep" not in end or failure == "not done within 1.5 s"
    assert alive(tmp_path / "pids") == []
    assert time.monotonic() - begin < 60


PRODUCER = """
import asyncio, os, sys
from pathlib import Path
from producer.gateway.agent_process import run_agent
task = Path(sys.argv[1])
environment = dict(os.environ)
asyncio.run(run_agent([sys.executable, "-c", sys.argv[2]], environment=environment, task=task, timeout_s=600))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_agents_end_with_a_producer_that_is_killed(tmp_path, number) -> None:
    task, pids = tmp_path / "task.json", tmp_path / "pids"
    task.write_text("{}")
    code = SPAWN + "time.sleep(600)"
    producer = subprocess.Popen(
        [sys.executable, "-c", PRODUCER, str(task), code], env={**os.environ, "PIDS": str(pids)}
    )
    deadline = time.monotonic() + 60
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < deadline and producer.poll() is None
        time.sleep(0.02)
    producer.send_signal(number)
    producer.wait(60)
    while alive(pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_agent_that_is_cancelled_is_killed_first(tmp_path) -> None:
    task, pids = tmp_path / "task.json", tmp_path / "pids"
    task.write_text("{}")

    async def cancel() -> None:
        environment = {"PIDS": str(pids), "PATH": os.environ["PATH"]}
        code = "import sys; print('slow', file=sys.stderr, flush=True)" + SPAWN + "time.sleep(600)"
        command, times = [sys.executable, "-S", "-c", code], {"timeout_s": 600, "errors": tmp_path / "errors.txt"}
        running = asyncio.ensure_future(run_agent(command, environment=environment, task=task, **times))
        while not pids.exists() or len(pids.read_text().split()) < 2:
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(asyncio.wait_for(cancel(), 30))
    assert alive(pids) == []
    assert (tmp_path / "errors.txt").read_text() == "slow\n", "what it wrote is kept"


def test_an_agent_gets_the_commands_variables_but_no_credentials_of_the_run() -> None:
    base = {"HOME": "/h", "RAY_AUTH_TOKEN": "r", "COATI_REWARD_TOKEN": "c", "OPENAI_API_KEY": "o", "NO_PROXY": "a.b"}
    given = agent_variables(base, url="http://127.0.0.1:5/episodes/e/v1", token="t", task=Path("/tmp/task.json"))
    assert given == {
        "HOME": "/h",
        "NO_PROXY": "a.b,127.0.0.1",
        "no_proxy": "127.0.0.1",
        "OPENAI_BASE_URL": "http://127.0.0.1:5/episodes/e/v1",
        "OPENAI_API_KEY": "t",
        "COATI_TASK": "/tmp/task.json",
        "COATI_REWARD_URL": "http://127.0.0.1:5/episodes/e/reward",
    }
