"""Test the life of a sandbox: start, end, what is left, and the messages if it cannot start."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from coati_rl.errors import ConfigError
from coati_rl.sandbox import Limits, Outcome, Sandbox, SandboxError, check_sandbox
from tests.ended import has_ended
from tests.integration.sandbox.conftest import PROJECT
from tests.integration.sandbox.running import end_of, own_processes

LIMITS = Limits(cpu_s=5)


def wait_until(claim: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def run(sandbox: Sandbox, source: str, limits: Limits = LIMITS) -> Outcome:
    return sandbox.run(source, limits=limits)


def test_closing_leaves_nothing_also_in_the_middle_of_a_program(sandbox: Sandbox) -> None:
    others = own_processes()
    other = Sandbox()
    run(other, "")
    assert len(own_processes()) == len(others) + 2
    other.close()
    assert own_processes() == others
    other.close()
    assert run(other, "print('again')").output == b"again\n"  # it starts again
    other.close()
    assert own_processes() == others


@pytest.mark.parametrize("which", [0, 1], ids=["bubblewrap", "supervisor"])
def test_a_sandbox_whose_processes_were_killed_says_so_once_and_starts_again(which: int) -> None:
    others = own_processes()
    with Sandbox() as sandbox:
        run(sandbox, "")
        (bubblewrap,) = (child for child in psutil.Process().children() if child.pid not in others)
        victim = [bubblewrap, *bubblewrap.children()][which]
        victim.send_signal(signal.SIGKILL)
        wait_until(lambda: has_ended(victim))
        with pytest.raises(SandboxError, match="the sandbox does not answer"):
            run(sandbox, "print(1)")
        assert run(sandbox, "print(1)").output == b"1\n"


PARENT = """
import os, sys
from coati_rl.sandbox import Limits, Sandbox
import psutil
sandbox = Sandbox(is_isolated=sys.argv[1] == "isolated")
sandbox.run("", limits=Limits())
print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
sandbox.run("import os, time\\nif os.fork() == 0: os.setsid()\\nwhile True: time.sleep(1)", limits=Limits(cpu_s=60))
"""


@pytest.mark.parametrize("kind", ["isolated", "not isolated"])
def test_a_parent_that_is_killed_takes_everything_along(kind: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, kind], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        first = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        wait_until(lambda: len(first[-1].children(recursive=True)) == 2)  # the program is under way
        processes = [*first, *first[-1].children(recursive=True)]
        parent.kill()
    wait_until(lambda: not any(process.is_running() for process in processes))


def test_without_isolation_programs_run_with_the_user_s_rights_and_nothing_stays(tmp_path: Path) -> None:
    others = own_processes()
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    with Sandbox(is_isolated=False) as sandbox:
        assert run(sandbox, f"import os\nprint(os.getuid(), open({str(file)!r}).read())").output == (
            f"{os.getuid()} mine\n".encode()
        )
        processes = own_processes()
        assert len(processes) == len(others) + 1
        folder = run(sandbox, "import os\nopen('left', 'w').close()\nprint(os.getcwd())").output.decode().strip()
        leave = "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        os.fork()\n"
        assert run(sandbox, leave + "        time.sleep(100)").end == "exit"
        assert own_processes() == processes
        assert end_of(run(sandbox, "while True: pass", limits=Limits(cpu_s=0.3))) == "cpu"
        assert end_of(run(sandbox, "bytearray(1 << 40)")) == "exit 1"
        assert sandbox.run("def f(x): return x", stdin=b"[5]", function="f", limits=LIMITS).returned == b"5"
    assert own_processes() == others
    assert not Path(folder).exists()


def test_without_bubblewrap_there_is_no_sandbox_and_the_message_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"bwrap is not installed: install it .* or .* --code-verifier-api-url"):
        check_sandbox()


def test_an_environment_that_programs_could_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", "/tmp/python")
    with pytest.raises(ConfigError, match="with its own /tmp and /dev, and this Python is in /tmp/python"):
        check_sandbox()


def test_a_bubblewrap_that_may_not_make_walls_is_told_with_what_it_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="No permissions to create new namespace; bubblewrap needs user namespaces"):
        check_sandbox()


def test_a_sandbox_that_works_is_checked_in_silence() -> None:
    others = own_processes()
    check_sandbox()
    assert own_processes() == others
