"""Test calls between processes: answers, errors, calls that wait, and who is answered."""

import json
import socket
import subprocess
import sys
import threading
from multiprocessing import AuthenticationError
from pathlib import Path

import pytest

from coati_rl.errors import ConfigError, RunError
from coati_rl.processes.calls import Caller, CallServer
from tests.unit.processes.odd_errors import OtherArgumentsError


class Counter:
    """Something to call."""

    def __init__(self) -> None:
        self.number = 0
        self.is_waiting, self.may_go = threading.Event(), threading.Event()

    def add(self, number: int, *, times: int = 1) -> int:
        self.number += number * times
        return self.number

    def wait(self) -> bool:
        self.is_waiting.set()
        return self.may_go.wait(5.0)

    def fail(self, kind: str) -> None:
        if kind == "of a library":
            raise OtherArgumentsError(1, 2)
        raise RunError("the disk is full") if kind == "ours" else ValueError("a number is wrong")

    def lock(self) -> object:
        return threading.Lock()

    def secret(self) -> None:
        raise AssertionError("called without being offered")


@pytest.fixture
def served(tmp_path: Path):
    """The object, and the server that answers for it."""
    counter = Counter()
    server = CallServer({"counter": (counter, ("add", "wait", "fail", "lock"))}, tmp_path)
    yield counter, server
    counter.may_go.set()
    server.close()


def test_a_call_returns_what_the_method_returns_and_raises_what_it_raises(served) -> None:
    counter, server = served
    caller = Caller(server.invitation, "counter")
    assert [caller.add(2), caller.add(3, times=4), counter.number] == [2, 14, 14]
    with pytest.raises(RunError, match="the disk is full"):
        caller.fail("ours")
    with pytest.raises(ValueError, match="a number is wrong"):
        caller.fail("another")
    with pytest.raises(RunError, match="OtherArgumentsError: 1 is not 2"):
        caller.fail("of a library")
    with pytest.raises(RunError, match="TypeError: cannot pickle"):
        caller.lock()
    assert caller.add(1) == 15, "an error ends one call alone"


def test_what_is_not_offered_cannot_be_called(served) -> None:
    caller = Caller(served[1].invitation, "counter")
    with pytest.raises(KeyError):
        caller.secret()
    with pytest.raises(KeyError):
        Caller(served[1].invitation, "other").add(1)


def test_a_call_that_waits_holds_up_no_other_thread(served) -> None:
    counter, server = served
    caller, results = Caller(server.invitation, "counter"), []
    assert caller.add(1) == 1
    waiting = threading.Thread(target=lambda: results.append(caller.wait()))
    waiting.start()
    assert counter.is_waiting.wait(30.0)
    assert caller.add(1) == 2 and results == []
    counter.may_go.set()
    waiting.join(30.0)
    assert results == [True]


def test_one_without_the_key_is_refused_and_the_others_are_answered(served) -> None:
    _, server = served
    stranger = json.dumps({**json.loads(server.invitation), "key": "00" * 32})
    with pytest.raises(Exception, match=r"digest|rejected"):
        Caller(stranger, "counter").add(1)
    assert Caller(server.invitation, "counter").add(1) == 1


def test_a_call_ends_when_its_process_does(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys, threading; from coati_rl.processes.calls import CallServer\n"
        "class Asleep:\n    def wait(self): threading.Event().wait()\n"
        "print(CallServer({'it': (Asleep(), ('wait',))}, pathlib.Path(sys.argv[1])).invitation, flush=True)\n"
        "sys.stdin.readline(); os._exit(0)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        caller = Caller(process.stdout.readline(), "it")
        threading.Timer(0.3, process.stdin.close).start()
        with pytest.raises((EOFError, OSError)):
            caller.wait()


def test_the_socket_is_gone_after_the_end(tmp_path: Path) -> None:
    server = CallServer({}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["calls"]
    server.close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_whose_path_is_too_long_for_a_socket_is_refused_with_the_remedy(tmp_path: Path) -> None:
    long = tmp_path / ("t" * 100) / "coati-12345678"
    long.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"TMPDIR .*t{100}: \d+ characters too long .*; set TMPDIR=/tmp"):
        CallServer({}, long)


def test_an_address_takes_the_place_of_the_directory_for_callers_of_other_machines(tmp_path):
    class Adder:
        def add(self, first, second):
            return first + second

    server = CallServer({"adder": (Adder(), ("add",))}, tmp_path, address="127.0.0.1")
    try:
        with socket.create_connection(json.loads(server.invitation)["address"]):  # a stranger, who says nothing
            assert Caller(server.invitation, "adder").add(2, 3) == 5
        wrong = json.dumps({**json.loads(server.invitation), "key": "00"})
        with pytest.raises(AuthenticationError):
            Caller(wrong, "adder").add(2, 3)
        assert list(tmp_path.iterdir()) == []
    finally:
        server.close()
