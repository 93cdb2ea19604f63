"""Test that the subreaper reports how the driver ended, and leaves no process and no scratch directory."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from coati_rl.processes.subreaper import run_under_subreaper

ROOT = Path(__file__).resolve().parents[3]
DRIVER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from coati_rl.processes.exit_messages import RunNote, write_note
from coati_rl.processes.subreaper import run_under_subreaper

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

sys.exit(run_under_subreaper(main))
"""


@pytest.fixture
def start():
    """How the driver ends, as a statement -> (the subreaper, the process that the driver started, the scratch)."""
    started = []

    def run(end, **options):
        command = [sys.executable, "-c", DRIVER.format(end=end)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        subreaper = subprocess.Popen(command, cwd=ROOT, text=True, **pipes, **options)
        pid, scratch = subreaper.stdout.readline().split()
        started.append((subreaper, psutil.Process(int(pid))))
        assert Path(scratch).is_dir()
        subreaper.stdin.write("\n")
        subreaper.stdin.flush()
        return *started[-1], Path(scratch)

    yield run
    for subreaper, orphan in started:
        subreaper.kill()
        subreaper.wait()
        for pipe in (subreaper.stdin, subreaper.stdout, subreaper.stderr):
            pipe.close()
        if orphan.is_running():
            orphan.kill()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("return 2", 2),
        ("os._exit(7)", 7),
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("return 0", 0), ("raise SystemExit(1)", 1))),
    ],
)
def test_the_drivers_exit_code_comes_out_and_what_it_started_is_ended(start, end, code):
    subreaper, orphan, scratch = start(end)
    assert subreaper.wait(60) == code
    assert subreaper.stderr.read() == ""
    assert not orphan.is_running()
    assert not scratch.exists()


def test_of_a_driver_that_was_killed_the_parent_process_says_what_it_was_and_how_to_resume(start, tmp_path):
    run_dir = tmp_path / "my run"
    for step in (20, 100):
        checkpoint = run_dir / "checkpoints" / f"step-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
        files = {"state.json": {"bytes": 2, "xxh3_128": ""}}
        (checkpoint / "manifest.json").write_text(json.dumps({"files": files}))
    paths = f"run_dir=Path({str(run_dir)!r}), checkpoints=Path({str(checkpoint.parent)!r})"
    note = f"write_note(scratch, RunNote({paths}))"
    subreaper, orphan, scratch = start(f"{note}; os.kill(os.getpid(), signal.SIGKILL)")
    assert subreaper.wait(60) == 1, "as documented for a run that failed"
    assert subreaper.stderr.read() == (
        "rl_example.py: the run failed: its driver was killed by SIGKILL "
        "(possibly out of memory: see the kernel's log); everything was stopped; "
        f"resume from step 100 with: python rl_example.py --config '{run_dir}/config.yaml' -cp '{run_dir}'\n"
    )
    assert not orphan.is_running()
    assert not scratch.exists()


def test_output_that_nobody_takes_does_not_change_the_exit_code():
    run = "sys.exit(run_under_subreaper(lambda _: sys.stdout.write('1') and 3))"
    command = [sys.executable, "-c", f"import sys; from coati_rl.processes.subreaper import run_under_subreaper; {run}"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # it is the last flush that fails
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (3, b"")


def test_without_a_temporary_directory_nothing_starts(monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    assert run_under_subreaper(lambda _: pytest.fail("it runs"), prog="coati-rl sft") == 2
    message = "coati-rl sft: TMPDIR: /dev/null/coati-[a-z0-9_]+: Not a directory; set it to a directory with free space"
    assert re.match(message, capsys.readouterr().err)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_those_of_no_file_and_change_no_exit_code(tmp_path, closed):
    program = f"""
import subprocess, sys
from coati_rl.processes.subreaper import run_under_subreaper

def main(scratch):
    with open({str(tmp_path / "checkpoint")!r}, "w", buffering=1) as file:
        print("not in the file", file=sys.stderr)
        subprocess.run(["sh", "-c", "echo neither; echo nor that >&2"], close_fds=False)
        file.write("whole")
    return 3 if file.closed and sys.stdin is not None else 1

sys.exit(run_under_subreaper(main))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, program]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode == 3
    assert (tmp_path / "checkpoint").read_text() == "whole"


ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", ENDING)
def test_a_signal_to_the_parent_process_ends_the_driver_as_ctrl_c_does(start, number):
    subreaper, orphan, _ = start("time.sleep(60)")
    os.kill(subreaper.pid, number)
    assert subreaper.wait(60) == 130
    assert subreaper.stderr.read() == "", "the driver itself says it"
    assert not orphan.is_running()


@pytest.mark.full
def test_under_nohup_a_closed_terminal_ends_nothing(start):
    subreaper, _, _ = start(
        "print('goes on', flush=True); time.sleep(2)", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert subreaper.stdout.readline() == "goes on\n"
    os.kill(subreaper.pid, signal.SIGHUP)
    assert subreaper.wait(60) == 0


def test_a_driver_that_is_stopped_is_continued_so_that_it_can_end_by_itself(start):
    subreaper, orphan, _ = start("orphan.send_signal(signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)")
    driver = next(process for process in psutil.Process(subreaper.pid).children() if process.pid != orphan.pid)
    deadline = time.monotonic() + 60
    while driver.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(subreaper.pid, signal.SIGINT)
    assert subreaper.wait(60) == 130
    assert subreaper.stderr.read() == ""
    assert not orphan.is_running()


def test_a_driver_that_does_not_end_is_killed_after_the_grace_period(start):
    subreaper, orphan, scratch = start("hang(scratch, 2.0)")
    assert subreaper.stdout.readline() == "hangs\n"
    begin = time.monotonic()
    os.kill(subreaper.pid, signal.SIGTERM)
    assert subreaper.wait(60) == 130
    assert time.monotonic() - begin >= 2.0
    assert subreaper.stdout.read() == "was told\n"
    said = (
        "rl_example.py: interrupted; processes that had not ended after 2 s were killed; "
        "no checkpoint was written: start it again"
    )
    assert subreaper.stderr.read() == said + "\n"
    assert not orphan.is_running()
    assert not scratch.exists()


@pytest.mark.parametrize("second", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_second_signal_kills_at_once_what_is_left(start, second):
    subreaper, orphan, _ = start("hang(scratch, 600.0)")
    assert subreaper.stdout.readline() == "hangs\n"
    os.kill(subreaper.pid, signal.SIGINT)
    assert subreaper.stdout.readline() == "was told\n"
    os.kill(subreaper.pid, signal.SIGINT)  # the same one again, as `timeout` sends it
    time.sleep(1.0)
    assert subreaper.poll() is None
    os.kill(subreaper.pid, second)
    assert subreaper.wait(60) == 130
    assert subreaper.stderr.read().startswith("rl_example.py: interrupted twice; the remaining processes were killed")
    assert not orphan.is_running()


def test_a_driver_outlives_no_parent_process(start):
    subreaper, _, scratch = start("time.sleep(60)")
    subreaper.kill()
    subreaper.wait(60)
    deadline = time.monotonic() + 60
    while scratch.exists():  # the driver removes it as after Ctrl-C
        assert time.monotonic() < deadline
        time.sleep(0.02)
