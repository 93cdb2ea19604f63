"""Whatever ends the driver, the guardian says how it ended and leaves no process and no scratch directory behind."""

import json
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
import os, signal, subprocess, sys, time
from pathlib import Path
from coati_rl.runtime.ending import RunNote, write_note
from coati_rl.runtime.guardian import run_guarded

def main(scratch):
    orphan = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        print(orphan.pid, scratch, flush=True)
        sys.stdin.readline()
        return end(scratch, orphan)
    except KeyboardInterrupt:
        return 130

def end(scratch, orphan):
    {end}

def hang(scratch, grace_s):
    write_note(scratch, RunNote(run_dir=Path("run"), checkpoints=Path("run/checkpoints"), grace_s=grace_s))
    state = "hangs"
    while True:
        try:
            print(state, flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            state = "was told"

sys.exit(run_guarded(main))
"""


@pytest.fixture
def start():
    """How the driver ends, as a statement -> (the guardian, the process that the driver started, the scratch)."""
    started = []

    def run(end, **options):
        command = [sys.executable, "-c", DRIVER.format(end=end)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        guardian = subprocess.Popen(command, cwd=ROOT, text=True, **pipes, **options)
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
        for pipe in (guardian.stdin, guardian.stdout, guardian.stderr):
            pipe.close()
        if orphan.is_running():
            orphan.kill()


@pytest.mark.parametrize(
    ("end", "code"), [("return 0", 0), ("return 2", 2), ("raise SystemExit(1)", 1), ("os._exit(7)", 7)]
)
def test_the_drivers_exit_code_comes_out_and_what_it_started_is_ended(start, end, code):
    guardian, orphan, scratch = start(end)
    assert guardian.wait(20) == code
    assert guardian.stderr.read() == ""
    assert not orphan.is_running()
    assert not scratch.exists()


def test_of_a_driver_that_was_killed_the_guardian_says_what_it_was_and_how_to_resume(start, tmp_path):
    run_dir = tmp_path / "my run"
    for step in (20, 100):
        checkpoint = run_dir / "checkpoints" / f"step-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
        files = {"state.json": {"bytes": 2, "xxh3_128": ""}}
        (checkpoint / "manifest.json").write_text(json.dumps({"files": files}))
    paths = f"run_dir=Path({str(run_dir)!r}), checkpoints=Path({str(checkpoint.parent)!r})"
    note = f"write_note(scratch, RunNote({paths}))"
    guardian, orphan, scratch = start(f"{note}; os.kill(os.getpid(), signal.SIGKILL)")
    assert guardian.wait(20) == 1, "as documented for a run that failed"
    assert guardian.stderr.read() == (
        "rl_example.py: the run failed: its driver was killed by SIGKILL (was memory short? the kernel's log says so); "
        "everything was stopped; go on from step 100 with: python rl_example.py "
        f"--config '{run_dir}/config.yaml' -cp '{run_dir}'\n"
    )
    assert not orphan.is_running()
    assert not scratch.exists()


def test_output_that_nobody_takes_does_not_change_the_exit_code():
    run = "sys.exit(run_guarded(lambda _: sys.stdout.write('1') and 3))"
    command = [sys.executable, "-c", f"import sys; from coati_rl.runtime.guardian import run_guarded; {run}"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # it is the last flush that fails
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (3, b"")


ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_to_the_guardian_ends_the_driver_as_ctrl_c_does(start, number):
    guardian, orphan, _ = start("time.sleep(60)")
    os.kill(guardian.pid, number)
    assert guardian.wait(20) == 130
    assert guardian.stderr.read() == "", "the driver itself says it"
    assert not orphan.is_running()


def test_under_nohup_a_closed_terminal_ends_nothing(start):
    guardian, _, _ = start(
        "print('goes on', flush=True); time.sleep(2)", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert guardian.stdout.readline() == "goes on\n"
    os.kill(guardian.pid, signal.SIGHUP)
    assert guardian.wait(20) == 0


def test_a_driver_that_is_stopped_is_continued_so_that_it_can_end_by_itself(start):
    guardian, orphan, _ = start("orphan.send_signal(signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)")
    driver = next(process for process in psutil.Process(guardian.pid).children() if process.pid != orphan.pid)
    deadline = time.monotonic() + 10
    while driver.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(guardian.pid, signal.SIGINT)
    assert guardian.wait(10) == 130
    assert guardian.stderr.read() == ""
    assert not orphan.is_running()


def test_a_driver_that_does_not_end_is_killed_after_the_grace_period(start):
    guardian, orphan, scratch = start("hang(scratch, 2.0)")
    assert guardian.stdout.readline() == "hangs\n"
    begin = time.monotonic()
    os.kill(guardian.pid, signal.SIGTERM)
    assert guardian.wait(20) == 130
    assert time.monotonic() - begin >= 2.0
    assert guardian.stdout.read() == "was told\n"
    said = (
        "rl_example.py: interrupted; what had not ended after 2 s was killed; no checkpoint was written: start it again"
    )
    assert guardian.stderr.read() == said + "\n"
    assert not orphan.is_running()
    assert not scratch.exists()


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills_at_once_what_is_left(start, second):
    guardian, orphan, _ = start("hang(scratch, 600.0)")
    assert guardian.stdout.readline() == "hangs\n"
    os.kill(guardian.pid, signal.SIGINT)
    assert guardian.stdout.readline() == "was told\n"
    os.kill(guardian.pid, signal.SIGINT)  # the same one again, as `timeout` sends it
    time.sleep(1.0)
    assert guardian.poll() is None
    os.kill(guardian.pid, second)
    assert guardian.wait(10) == 130
    assert guardian.stderr.read().startswith("rl_example.py: interrupted twice; what had not ended was killed")
    assert not orphan.is_running()


def test_a_driver_outlives_no_guardian(start):
    guardian, _, scratch = start("time.sleep(60)")
    guardian.kill()
    guardian.wait(20)
    deadline = time.monotonic() + 10
    while scratch.exists():  # the driver removes it as after Ctrl-C
        assert time.monotonic() < deadline
        time.sleep(0.02)
