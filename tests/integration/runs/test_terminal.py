"""Run a job at a terminal of its own: what it shows, and what is left there after Ctrl-C, a hang-up and a kill."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import threading
from contextlib import suppress

import psutil
import pytest

from coati_rl.checkpoint.directory import newest_complete
from tests.integration.runs.conftest import Run
from tests.integration.runs.places import OwnPlaces
from tests.integration.runs.test_offline import JobRun, job_flags, rows
from tests.unit.observability.screen import Terminal, until

__all__ = ["job_flags", "rows"]  # fixtures
CTRL_C = b"\x03"


class TerminalRun(JobRun):
    """A job whose input and output are a terminal, which a thread reads."""

    def __init__(self, arguments: list[str], run_dir) -> None:
        self.run_dir, self.family = run_dir, {}
        self.places = OwnPlaces(run_dir)
        self.terminal = Terminal(columns=70, rows=30)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "xterm-256color"}
        self.places.forget_ours(environment)
        environment.pop("NO_COLOR", None)
        command = self.places.command([sys.executable, *self.program, *arguments, "--run-dir", str(run_dir)])
        with self.terminal.stream as stream:
            self.process = subprocess.Popen(
                command,
                **dict.fromkeys(("stdin", "stdout", "stderr"), stream),
                env=environment,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._is_read = True
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # nobody writes any more
            while self._is_read:
                self.terminal.read(timeout_s=0.2)

    def hang_up(self) -> None:
        """Close the terminal, as its window does."""
        self._is_read = False
        self._reader.join()
        os.close(self.terminal.master)

    def text(self) -> str:
        return "\n".join(self.shown())

    def shown(self) -> list[str]:
        """Return the lines on the screen and those that have scrolled out, once all is read."""
        if self.process.poll() is not None:
            self._reader.join(5.0)
        return [line for line in self.terminal.screen.shown if line]

    def sentences(self) -> str:
        """Return what was printed, lines that the terminal has broken put together."""
        return "".join(line.ljust(70) if len(line) == 70 else f"{line}\n" for line in self.shown())


@pytest.fixture(scope="session")
def run_class():
    return TerminalRun


def has_bar(run: Run) -> bool:
    return any("━" in line for line in run.shown())


def wait_for_bar(run: Run) -> None:
    run.wait_for_step(2)
    until(lambda: any(line.startswith("loss +") for line in run.shown()), 30.0)
    run.processes()


@pytest.mark.full
def test_a_job_shows_its_steps_in_a_block_and_ends_with_a_summary(start_run, job_flags):
    run = start_run(*job_flags("sft"))
    wait_for_bar(run)
    (figures,) = [line for line in run.shown() if line.startswith("loss +")]
    assert "tok/s" in figures and any(line.startswith("step ") and " left " in line for line in run.shown())
    assert run.wait() == 0, run.text()
    assert not has_bar(run) and run.terminal.screen.column == 0
    said = run.sentences()
    assert f"checkpoint: {run.run_dir}/checkpoints/step-8\n" in said
    assert f"serve {run.run_dir}/checkpoints/step-8\n" in said and f"report {run.run_dir}\n" in said
    log = (run.run_dir / "logs/driver.log").read_text()
    assert [record["step"] for record in run.records()] == [*range(1, 9)]
    assert all(f" step {step}/8  loss " in log for step in range(1, 9))


@pytest.mark.full
def test_ctrl_c_at_the_terminal_leaves_the_last_line_and_no_block(start_run, job_flags):
    run = start_run(*job_flags("sft", epochs=200), "-si", -1, "-ei", -1)
    wait_for_bar(run)
    os.write(run.terminal.master, CTRL_C)
    assert run.wait(90) == 130, run.text()
    assert not has_bar(run) and run.terminal.screen.column == 0
    assert "interrupted; everything was stopped; resume from step " in run.sentences().split("report: ")[1]
    assert run.left_over() == []


@pytest.mark.full
def test_a_terminal_that_is_closed_ends_the_job_with_a_checkpoint(start_run, job_flags):
    run = start_run(*job_flags("sft", epochs=200), "-si", -1, "-ei", -1)
    wait_for_bar(run)
    run.hang_up()
    assert run.process.wait(90) == 130
    last = json.loads((run.run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert newest_complete(run.run_dir / "checkpoints").name == f"step-{last}"
    assert run.left_over() == []


@pytest.mark.full
def test_a_killed_driver_leaves_its_block_and_the_last_line_below_it(start_run, job_flags):
    run = start_run(*job_flags("sft", epochs=200), "-si", -1, "-ei", -1)
    wait_for_bar(run)
    (driver,) = psutil.Process(run.process.pid).children()
    driver.send_signal(signal.SIGKILL)
    assert run.wait(90) == 1, run.text()
    lines = run.shown()
    (bar,) = [number for number, line in enumerate(lines) if "━" in line]
    assert lines[bar + 1].startswith("loss +") and run.terminal.screen.column == 0
    assert "the run failed: its driver was killed by SIGKILL" in "".join(lines[bar + 2 :])
    assert run.left_over() == []
