"""Test that the kernel ends a process with its parent, and that orphans come to an ancestor that takes them."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.ended import has_ended

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
sys.stdin.readline()
"""
CHILD = """
import os, signal, sys, time
from coati_rl.processes.ending import end_with_parent
{before}
end_with_parent(int(sys.argv[1]), signal.{name})
{after}
time.sleep(600)
"""


def goes_in_time(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return has_ended(pid)


@pytest.fixture
def parent():
    """Code of a child -> its parent's process, and the child's id."""
    started = []

    def start(code: str):
        command = [sys.executable, "-c", PARENT, code]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        pid = int(process.stdout.readline().split()[0])
        started.append((process, pid))
        return process, pid

    yield start
    for process, pid in started:
        process.kill()
        process.communicate()
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_process_ends_with_its_parent_whatever_ended_that(parent, name: str) -> None:
    process, pid = parent(CHILD.format(before="", name=name, after="print('ready', flush=True)"))
    assert not has_ended(pid)
    process.kill()
    assert goes_in_time(pid)


def test_one_whose_parent_had_ended_before_ends_at_once(parent) -> None:
    late = "print('waits', flush=True); time.sleep(0.1)\nwhile os.getppid() == int(sys.argv[1]): time.sleep(0.02)"
    process, pid = parent(CHILD.format(before=late, name="SIGKILL", after=""))
    process.kill()
    assert goes_in_time(pid)


def test_an_orphan_comes_to_the_ancestor_that_takes_orphans() -> None:
    code = """
import os, subprocess, sys, time
from coati_rl.processes.ending import adopt_orphans
adopt_orphans()
sleep = "[sys.executable, '-c', 'import time; time.sleep(600)']"
middle = f"import subprocess, sys; print(subprocess.Popen({sleep}, stdout=-3).pid)"
orphan = int(subprocess.run([sys.executable, "-c", middle], stdout=-1, text=True, check=True).stdout)
print(int(open(f"/proc/{orphan}/stat").read().rpartition(")")[2].split()[1]) == os.getpid())
os.kill(orphan, 9)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout == "True\n"
