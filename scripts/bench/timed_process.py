"""Run a command in a process with a deadline, end it in any case, and measure its CPU time by role.

In: a command line. Out: the process while it runs; the number of steps in a run's metrics.jsonl together with the CPU
seconds so far. A failed run raises SystemExit with the end of its output.
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

RUN_TIMEOUT_S, END_TIMEOUT_S, POLL_S = 900.0, 60.0, 0.05
ROLES = {"ray::ProducerActor": "producer", "ray::TrainerActor": "trainer", "ray::CoordinatorActor": "coordinator"}
SHOWN = 2000  # characters of a failed run's output


@contextmanager
def running(command: list[str], *, num_threads: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process, and end it after the body."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        _end(process)
        output = log.read_text(encoding="utf-8", errors="replace")[-SHOWN:]
        raise SystemExit(f"{error}\n{shlex.join(command)}\n{output}") from error
    finally:
        _end(process)


def finish(process: subprocess.Popen[bytes], *, timeout_s: float = RUN_TIMEOUT_S) -> None:
    """Wait for exit code 0. Raises: RuntimeError for another exit code, TimeoutExpired if it does not end."""
    if code := process.wait(timeout_s):
        raise RuntimeError(f"exit code {code}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the process if it runs; our command line then stops all its processes."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)  # if it has stopped itself
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def continue_until_stopped(process: subprocess.Popen[bytes], *, timeout_s: float) -> None:
    """Continue a process that has stopped itself, or has just started, until it stops itself (SIGSTOP).

    Raises: RuntimeError if it ends before, or does not stop in time.
    """
    process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + timeout_s
    while True:
        pid, status = os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)
        if pid and os.WIFSTOPPED(status):
            return
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            raise RuntimeError(f"exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"it did not stop itself in {timeout_s:.0f} s")
        time.sleep(POLL_S)


def wait_for_step(
    process: subprocess.Popen[bytes], metrics: Path, step: int, *, timeout_s: float = RUN_TIMEOUT_S
) -> tuple[int, dict[str, float]]:
    """Wait for `step`. Returns: the recorded steps, and the CPU seconds by role then. Raises: RuntimeError."""
    deadline = time.monotonic() + timeout_s
    while True:
        steps = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
        if steps >= step:
            return steps, cpu_by_role(process.pid)
        if process.poll() is not None:
            raise RuntimeError(f"exit code {process.returncode} before step {step}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"step {step} was not reached in {timeout_s:.0f} s")
        time.sleep(POLL_S)


def cpu_by_role(pid: int) -> dict[str, float]:
    """Return the CPU seconds of a process and its descendants by role; driver, Ray and reward workers are `other`."""
    seconds = dict.fromkeys((*ROLES.values(), "other"), 0.0)
    with suppress(psutil.Error):  # it has just ended
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                title, times = " ".join(process.cmdline()), process.cpu_times()
                role = next((name for actor, name in ROLES.items() if title.startswith(actor)), "other")
                seconds[role] += times.user + times.system
    return seconds
