"""Test interpreters that keep their variables: limits of each call, attacks as calls, sessions that do not meet."""

import time
from collections.abc import Iterator

import psutil
import pytest

from coati_rl.sandbox import Limits, Outcome, PythonSession, Sandbox, SandboxError
from tests.integration.sandbox.attack import Attack
from tests.integration.sandbox.conftest import Target
from tests.integration.sandbox.running import end_of, once_decided, own_processes
from tests.integration.sandbox.test_attacks import ALL, by_name

LIMITS = Limits(cpu_s=2.0, output_bytes=1 << 20)
_OF_PROGRAMS = {  # whose outcome is that of a whole program: its end, its file solution.py, its first process's stack
    "files of the machine",
    "endless exit handler",
    "a thread that sleeps past the end",
    "inherited descriptors",  # there is one more, to the supervisor
    "code that runs next time: site-packages, the standard library, the sandbox's own",
    "endless recursion without a limit",
    "the C stack",
}
FAST = {
    "endless loop",
    "fork bomb that goes on when it cannot",
    "fork bomb behind an ended program",
    "daemon that holds the output",
    "process 1 killed by a child",
    "everything killed that can be",
    "endless output",
    "disk fill",
    "one large piece",
    "its own environment",
    "everything in /proc",
    "what is left of the secret in its own memory",
    "memory of other processes",
    "a server on this machine over TCP and UDP, IPv4 and IPv6",
    "new namespaces by unshare",
}
AS_CALLS = [attack for attack in ALL if attack.name not in _OF_PROGRAMS]


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[PythonSession]:
    with PythonSession(sandbox, LIMITS) as session:
        yield session


def output(session: PythonSession, code: str) -> str:
    outcome = session.call(code)
    assert end_of(outcome) == "exit 0", outcome.error_output
    return outcome.output.decode()


def test_variables_functions_and_files_are_kept_between_calls(session: PythonSession) -> None:
    assert output(session, "x = 5\ndef f(y): return x * y\nopen('note', 'w').write('kept')") == "4\n"
    assert output(session, "x += 1\nprint(f(7))\nopen('note').read()") == "42\n'kept'\n"
    assert output(session, "import math\nNone") == ""
    assert output(session, "math.floor(2.5)") == "2\n"


def test_an_integer_may_have_more_digits_than_python_converts(session: PythonSession) -> None:
    assert output(session, "10**5000") == "1" + 5000 * "0" + "\n"
    assert output(session, "print(int('7' * 5000) % 10)") == "7\n"


def test_an_exception_is_told_with_the_lines_of_its_call_and_ends_nothing(session: PythonSession) -> None:
    output(session, "x = 1\ndef f():\n    return x / 0")
    outcome = session.call("\nf()")
    assert end_of(outcome) == "exit 1"
    assert outcome.error_output.decode().splitlines() == [
        "Traceback (most recent call last):",
        '  File "<call 2>", line 2, in <module>',
        "    f()",
        '  File "<call 1>", line 3, in f',
        "    return x / 0",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]
    assert session.call("x = (").error_output.endswith(b"SyntaxError: '(' was never closed\n")
    assert end_of(session.call("raise SystemExit(3)")) == "exit 1"
    assert output(session, "x") == "1\n"


@pytest.mark.parametrize(
    ("code", "end"),
    [("while True: pass", "cpu"), ("import time; time.sleep(100)", "wall"), ("import os; os._exit(7)", "exit 7")],
)
def test_a_call_that_reaches_a_limit_ends_the_interpreter_and_the_next_begins_anew(
    session: PythonSession, code: str, end: str
) -> None:
    session = PythonSession(session._sandbox, Limits(cpu_s=0.3))
    output(session, "x = 1")
    undecided = {"starved"}
    outcome = once_decided(lambda: session.call(code), lambda outcome: outcome.end in undecided)
    assert end_of(outcome) == end
    assert not session.is_open
    assert session.call("x").error_output.endswith(b"NameError: name 'x' is not defined\n")
    session.close()


def test_each_call_has_its_whole_time(session: PythonSession) -> None:
    session = PythonSession(session._sandbox, Limits(cpu_s=0.4))
    burn = "import time\nend = time.process_time() + 0.25\nwhile time.process_time() < end: pass"
    for _ in range(2):  # 0.5 s together
        outcome = session.call(burn)
        assert end_of(outcome) == "exit 0"
        assert 0.2 < outcome.cpu_s < 0.4
    session.close()


def test_what_a_call_leaves_running_stands_still_until_the_next_one(session: PythonSession) -> None:
    code = """
import os, threading, time
counted = 0
def count():
    global counted
    while True:
        counted += 1
threading.Thread(target=count, daemon=True).start()
if os.fork() == 0:
    os.setsid()
    while True: pass
"""
    output(session, code)
    before = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in own_processes())
    time.sleep(0.5)
    assert sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in own_processes()) - before < 0.05
    assert output(session, "first = counted\ntime.sleep(0.1)\ncounted > first") == "True\n"


def test_output_is_that_of_the_call_and_limited(session: PythonSession) -> None:
    outcome = session.call("print('x' * (3 << 20))")
    assert end_of(outcome) == "exit 1"
    assert len(outcome.output) <= LIMITS.output_bytes
    assert output(session, "print('next')") == "next\n"
    assert output(session, "import sys\nsys.stdout = None\nsys.stdin.close()") == ""
    assert output(session, "2") == "2\n"
    assert session.call("input()").error_output.endswith(b"EOFError: EOF when reading a line\n")


def test_two_sessions_see_neither_each_others_variables_nor_files_nor_processes(session: PythonSession) -> None:
    look = "import os\nprint('mine' in globals(), os.listdir('/tmp'), os.listdir('/dev/shm'))\nos.kill(2, 0)"
    with Sandbox() as sandbox, PythonSession(sandbox, LIMITS) as other:
        output(other, "import os, time\nmine = 1\nopen('/tmp/a', 'w'); open('/dev/shm/a', 'w'); child = os.fork()")
        outcome = session.call(look)
        assert outcome.output == b"False [] []\n"
        assert outcome.error_output.endswith(b"ProcessLookupError: [Errno 3] No such process\n")
        assert output(other, "mine") == "1\n"


def test_a_fork_of_a_session_ends_with_the_code_that_made_it(session: PythonSession) -> None:
    output(session, "import os, time\nchild = os.fork()\nif not child: time.sleep(0.2)")
    assert output(session, "time.sleep(0.6)\nprint('whole')") == "whole\n", "a fork does not answer for the session"
    assert output(session, "os.waitpid(child, 0)[1]") == "0\n"


def test_a_later_session_and_program_find_nothing_of_an_earlier_one(sandbox: Sandbox) -> None:
    leave = "import builtins, json, os\nbuiltins.left = 1\njson.dumps = print\nopen('/tmp/left', 'w')\nos.fork()"
    look = "import builtins, json, os\nprint(hasattr(builtins, 'left'), json.dumps(1), os.listdir('/tmp'))"
    with PythonSession(sandbox, LIMITS) as session:
        session.call(leave)
    with PythonSession(sandbox, LIMITS) as session:
        assert output(session, look) == "False 1 []\n"
    assert sandbox.run(look, limits=LIMITS).output == b"False 1 ['solution.py']\n"


def test_a_session_whose_sandbox_is_killed_says_so_and_begins_anew() -> None:
    others = own_processes()
    with Sandbox() as sandbox:
        session = PythonSession(sandbox, LIMITS)
        output(session, "x = 1")
        (bubblewrap,) = (child for child in psutil.Process().children() if child.pid not in others)
        family = [child for child in psutil.Process().children(recursive=True) if child.pid not in others]
        bubblewrap.kill()
        assert not psutil.wait_procs(family, timeout=10.0)[1]  # the kernel kills the others after it
        with pytest.raises(SandboxError, match="does not answer"):
            session.call("x")
        assert session.call("x").error_output.endswith(b"NameError: name 'x' is not defined\n")
        session.close()
    assert own_processes() == others


def test_an_open_session_ends_with_its_sandbox() -> None:
    others = own_processes()
    sandbox = Sandbox()
    session = PythonSession(sandbox, LIMITS)
    output(session, "import os\nchild = os.fork()")
    sandbox.close()
    assert own_processes() == others
    with pytest.raises(SandboxError):
        session.close()


@pytest.mark.parametrize(
    "attack",
    [pytest.param(each, marks=() if each.name in FAST else pytest.mark.full) for each in AS_CALLS],
    ids=[by_name(each) for each in AS_CALLS],
)
def test_an_attack_as_a_call_is_held_and_leaves_nothing(attack: Attack, sandbox: Sandbox, target: Target) -> None:
    source = attack.source
    for place, value in target.places.items():
        source = source.replace(f"@{place}@", value)
    before = own_processes()
    undecided = {"starved", "wall"} - set(attack.ends)

    def run() -> Outcome:
        with PythonSession(sandbox, attack.limits) as session:
            return session.call(source)

    outcome = once_decided(run, lambda outcome: outcome.end in undecided)
    said = outcome.output + outcome.error_output
    assert end_of(outcome) in {*attack.ends, "exit 1"} - ({"exit 1"} if attack.ends == ("exit 0",) else set()), said
    assert attack.prints is None or outcome.output.decode() == attack.prints, said[-2000:]
    assert target.secret.encode() not in said
    assert max(map(len, (outcome.output, outcome.error_output))) <= attack.limits.output_bytes
    assert own_processes() == before
    assert target.sleeper.poll() is None
    with PythonSession(sandbox, LIMITS) as session:
        assert output(session, "'next'") == "'next'\n"
