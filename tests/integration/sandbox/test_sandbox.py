"""Test that ordinary programs find the parts of a usual Python in the sandbox that solutions need."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from coati_rl.sandbox import Limits, Outcome, Sandbox
from tests.busy_cores import another_first_on_the_core_of
from tests.integration.sandbox.ordinary_programs import FUNCTIONS, PROGRAMS
from tests.integration.sandbox.running import end_of, once_decided, own_processes

LIMITS = Limits(cpu_s=5)


def run(sandbox: Sandbox, source: str, stdin: str = "", limits: Limits = LIMITS) -> Outcome:
    return sandbox.run(source, stdin=stdin.encode(), limits=limits)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_it_would_elsewhere(name: str, sandbox: Sandbox) -> None:
    source, stdin, output = PROGRAMS[name]
    outcome = run(sandbox, source, stdin)
    assert (end_of(outcome), outcome.output.decode(), outcome.error_output.decode()) == ("exit 0", output, "")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_called_and_its_value_returned(name: str, sandbox: Sandbox) -> None:
    source, function, arguments, returned = FUNCTIONS[name]
    outcome = sandbox.run(source, stdin=arguments.encode(), function=function, limits=LIMITS)
    assert (end_of(outcome), outcome.returned, outcome.error_output.decode()) == ("exit 0", returned, "")


@pytest.mark.parametrize(
    ("source", "end"),
    [
        ("raise SystemExit(3)", "exit 3"),
        ("import sys; sys.exit('sorry')", "exit 1"),
        ("import os; os._exit(7)", "exit 7"),
        ("1 / 0", "exit 1"),
        ("(", "exit 1"),
        ("import sys; sys.stdout.close()", "exit 0"),
        ("import os; print('x'); os.close(1)", "exit 120"),
        ("import ctypes; ctypes.string_at(0)", "signal 11"),
        ("import os; os.abort()", "signal 11"),
    ],
)
def test_a_program_s_end_is_told(source: str, end: str, sandbox: Sandbox) -> None:
    assert end_of(run(sandbox, source)) == end


def test_an_error_is_told_with_the_program_s_own_lines(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "def f(x):\n    return 1 / x\n\nf(0)\n")
    assert outcome.error_output.decode().splitlines() == [
        "Traceback (most recent call last):",
        '  File "/tmp/solution.py", line 4, in <module>',
        "    f(0)",
        '  File "/tmp/solution.py", line 2, in f',
        "    return 1 / x",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]
    assert outcome.explain(LIMITS) == "exit code 1: ZeroDivisionError: division by zero"


def test_five_megabytes_go_in_and_out(sandbox: Sandbox) -> None:
    text = "0123456789abcdef\n" * 300_000
    outcome = run(sandbox, "import sys\nsys.stdout.write(sys.stdin.read().upper())", text)
    assert outcome.output.decode() == text.upper()


def test_a_set_has_the_same_order_in_every_run(sandbox: Sandbox) -> None:
    source = "print(list({str(n) for n in range(100)}), hash('x'))"
    with Sandbox() as other:
        assert run(sandbox, source).output == run(sandbox, source).output == run(other, source).output


def test_time_and_waiting_are_told_apart(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "import time\nwhile time.process_time() < 0.3: pass\ntime.sleep(0.2)")
    assert 0.29 < outcome.cpu_s < 0.45
    assert outcome.wall_s - outcome.waited_s >= 0.45


def test_a_thread_that_others_keep_from_the_cores_has_its_time_back(sandbox: Sandbox) -> None:
    source = """
import threading, time
def f():
    while time.thread_time() < 0.4: pass
    print("x")
thread = threading.Thread(target=f)
thread.start()
thread.join()
"""
    burners = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    try:
        outcome = once_decided(
            lambda: run(sandbox, source, limits=Limits(cpu_s=0.5)), lambda outcome: outcome.end == "starved"
        )
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert (outcome.end, outcome.output) == ("exit", b"x\n")
    assert outcome.wall_s - outcome.waited_s < 1


def test_a_thread_that_has_no_core_at_the_end_of_its_limit_is_not_late(sandbox: Sandbox) -> None:
    """The kernel counts a wait when it ends; this one goes on, after as much sleep as the limit is long."""
    source = "import time\ntime.sleep(1.1)\nwhile time.process_time() < 0.2: pass"
    run(sandbox, "")  # it has started
    others = set(own_processes())

    def kept_from_its_core() -> Outcome:
        with ThreadPoolExecutor() as threads:
            ended = threads.submit(run, sandbox, source, limits=Limits(cpu_s=0.3))
            while not (started := set(own_processes()) - others):
                time.sleep(0.001)
            (program,) = started
            with another_first_on_the_core_of(program):
                time.sleep(3)
        return ended.result()

    assert end_of(once_decided(kept_from_its_core, lambda outcome: outcome.end == "starved")) == "exit 0"


def test_a_limit_on_the_clock_says_nothing_of_the_program(sandbox: Sandbox) -> None:
    limits = Limits(cpu_s=5, most_wall_s=0.2)
    outcome = run(sandbox, "import time; time.sleep(100)", limits=limits)
    assert outcome.end == "starved"
    assert re.fullmatch(r"no end after \d s, of which it waited \d s for a core", outcome.explain(limits))


def test_limits_are_those_of_the_run(sandbox: Sandbox) -> None:
    source = "x = bytearray(300 << 20)\nprint(len(x) >> 20)"
    assert run(sandbox, source).output == b"300\n"
    small = run(sandbox, source, limits=Limits(memory_bytes=200 << 20))
    assert small.explain(LIMITS) == "exit code 1: MemoryError"
    assert (
        run(sandbox, "print('x' * 2000)", limits=Limits(output_bytes=1000)).explain(LIMITS).startswith("exit code 120")
    )


def test_no_line_is_lost_where_several_processes_write_at_once(sandbox: Sandbox) -> None:
    source = (
        "import os\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        os.write(1, b'line\\n')\n"
        "        os._exit(0)\n"
        "for _ in range(8): os.wait()\n"
    )
    assert {run(sandbox, source).output for _ in range(30)} == {b"line\n" * 8}


def test_as_many_threads_as_allowed_fit_into_the_memory(sandbox: Sandbox) -> None:
    source = (
        "import threading\n"
        "done = threading.Event()\n"
        "threads = [threading.Thread(target=done.wait) for _ in range(30)]\n"
        "for thread in threads: thread.start()\n"
        "done.set()\n"
        "for thread in threads: thread.join()\n"
        "print(len(threads))\n"
    )
    assert run(sandbox, source).output == b"30\n"


def test_finalizers_find_what_the_program_has_defined(sandbox: Sandbox) -> None:
    source = "class A:\n    def __del__(self): print('bye', N)\nN = 3\na = A()\n"
    assert run(sandbox, source).output == b"bye 3\n"
