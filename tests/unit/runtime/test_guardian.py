"""Whatever ends the driver, the guardian says how it ended and leaves no process and no scratch directory behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
DRIVER = """
import os, subprocess, sys, time
from coati_rl.runtime.guardian import run_guarded

def main(scratch):
    orphan = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
    print(orphan.pid, scratch, flush=True)
    try:
        sys.stdin.readline()
        return end()
    except KeyboardInterrupt:
        return 130

def end():
    {end}

sys.exit(run_guarded(main))
"""


@pytest.fixture
def start():
    """How the driver ends, as a statement -> (the guardian, the process that the driver started, the scratch)."""
    started = []

    def run(end):
        command = [sys.executable, "-c", DRIVER.format(end=end)]
        guardian = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        pid, scratch = guardian.stdout.readline().split()
        started.append((guardian, psutil.Process(int(pid))))
        assert Path(scratch).is_dir()
        guardian.stdin.write("\n")
        guardian.stdin.flush()
        return *started[-1], Path(scratch)

    yield run
    for guardian, orphan in started:
        guardian.kill()
        guardian.wait()
        guardian.stdin.close()
        guardian.stdout.close()
        if orphan.is_running():
            orphan.kill()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("return 0", 0),
        ("return 2", 2),
        ("raise SystemExit(1)", 1),
        ("os.kill(os.getpid(), 9)", 128 + 9),
        ("os._exit(7)", 7),
    ],
)
def test_the_drivers_exit_code_comes_out_and_what_it_started_is_ended(start, end, code):
    guardian, orphan, scratch = start(end)
    assert guardian.wait(20) == code
    assert not orphan.is_running()
    assert not scratch.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_guardian_ends_the_driver_as_ctrl_c_does(start, number):
    guardian, orphan, _ = start("time.sleep(60)")
    os.kill(guardian.pid, number)
    assert guardian.wait(20) == 130
    assert not orphan.is_running()


def test_a_driver_outlives_no_guardian(start):
    guardian, _, scratch = start("time.sleep(60)")
    guardian.kill()
    guardian.wait(20)
    deadline = time.monotonic() + 10
    while scratch.exists():  # the driver removes it as after Ctrl-C
        assert time.monotonic() < deadline
        time.sleep(0.02)
