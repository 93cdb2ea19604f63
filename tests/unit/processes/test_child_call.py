"""Test calls of functions, and of an object's methods, in a child process."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from coati_rl.errors import ConfigError, RunError
from coati_rl.processes.child_call import ObjectInChild, call_in_child
from tests.unit.processes.odd_errors import OtherArgumentsError


def call(function):
    return call_in_child(function, what="the preparation")


def test_what_the_function_returns_is_returned_and_what_it_loads_is_gone():
    numbers = []

    def function():
        numbers.append(1)
        return [os.getpid(), numbers, b"x" * 2**20]

    pid, seen, large = call(function)
    assert (pid != os.getpid(), seen, len(large), numbers) == (True, [1], 2**20, [])


def test_a_mistake_of_the_user_is_raised_here():
    def function():
        raise ConfigError("--model x: is missing")

    with pytest.raises(ConfigError, match="--model x: is missing"):
        call(function)


def test_any_other_error_is_raised_with_where_it_was():
    def breaks():
        return [][1]

    with pytest.raises(IndexError) as caught:
        call(breaks)
    assert "in breaks" in caught.value.__notes__[0]


def test_an_error_that_cannot_be_made_again_is_named_with_where_it_was():
    def breaks():
        raise OtherArgumentsError(1, 2)

    with pytest.raises(RunError, match="OtherArgumentsError: 1 is not 2") as caught:
        call(breaks)
    assert "in breaks" in caught.value.__notes__[0]


def test_what_the_function_exits_with_is_raised_here():
    with pytest.raises(SystemExit, match="3"):
        call(lambda: sys.exit(3))


def test_a_child_that_is_killed_is_an_error_that_says_what_it_did():
    with pytest.raises(RunError, match="the preparation: its process was killed"):
        call(lambda: os.kill(os.getpid(), signal.SIGKILL))


INTERRUPTED = """
import os, signal
from coati_rl.processes.child_call import call_in_child

def interrupt_parent():
    print(os.getpid(), flush=True)
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()

try:
    call_in_child(interrupt_parent, what="the preparation")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_ends_the_child():
    """In a process without other threads, as the call requires: pytest's has those of other tests."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=200, check=True)
    child, said = done.stdout.split()
    assert (said, psutil.pid_exists(int(child))) == ("interrupted", False)


class Subject:
    """Do what a test asks."""

    def __init__(self):
        self.calls = 0

    def count(self, number):
        self.calls += number
        return self.calls

    def refuse(self):
        raise ConfigError("--model x: no such directory")

    def fail(self):
        return {}["missing"]

    def sleep(self):
        time.sleep(60)

    def end(self):
        os._exit(1)


@pytest.fixture
def worker(tmp_path):
    made = ObjectInChild(Subject, tmp_path / "log")
    yield made
    made.close()


def test_an_object_stays_in_its_process_between_calls(worker):
    assert worker.call("count", 2, timeout_s=20, what="counting") == 2
    assert worker.call("count", 3, timeout_s=20, what="counting") == 5


def test_a_refusal_comes_back_as_it_is_and_any_other_error_with_its_type(worker, tmp_path):
    with pytest.raises(ConfigError, match="--model x: no such directory"):
        worker.call("refuse", timeout_s=20, what="it")
    with pytest.raises(RunError, match="KeyError: 'missing'"):
        worker.call("fail", timeout_s=20, what="it")
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_call_that_hangs_or_ends_its_process_is_named(worker, tmp_path):
    with pytest.raises(RunError, match=r"asleep: did not end within 0 s"):
        worker.call("sleep", timeout_s=0.2, what="asleep")
    other = ObjectInChild(Subject, tmp_path / "other")
    with pytest.raises(RunError, match="counting: its process has ended"):
        other.call("end", timeout_s=20, what="counting")
    other.close()
