"""Test a Ray that is not ready within the time that it gives itself."""

import subprocess
import sys
import tempfile

import pytest

from coati_rl.errors import RunError
from coati_rl.runtime import cluster
from tests.ended import has_ended

LATE = Exception("The current node timed out during startup. This could happen because some of the raylet failed")
# Ray's raylet is stopped as it appears, so that Ray is late.
REAL = """
import os, signal, sys, threading, time
from pathlib import Path

import psutil
import ray

from coati_rl.runtime import cluster

stopped = []

def stop():
    while not stopped:
        for process in psutil.Process().children():
            if process.name() == "raylet":
                os.kill(process.pid, signal.SIGSTOP)
                stopped.append(process.pid)
        time.sleep(0.01)

threading.Thread(target=stop, daemon=True).start()
cluster._start(Path(sys.argv[1]) / "ray", num_cpus=1, num_gpus=0)
names = [process.name() for process in psutil.Process().children()]
assert names.count("raylet") == names.count("gcs_server") == 1 and not psutil.pid_exists(stopped[0]), names
assert ray.get(ray.remote(lambda: 1).remote(), timeout=120) == 1
ray.shutdown()
"""


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Errors of Ray's starts, None for one that succeeds -> how many there were."""

    def run(*errors):
        left = [*errors]

        def init(**options):
            if error := left.pop(0):
                raise error

        monkeypatch.setattr(cluster.ray, "init", init)
        cluster._start(tmp_path / "session", num_cpus=1, num_gpus=0)
        return len(errors) - len(left)

    return run


def test_it_is_started_once_more_and_what_the_first_one_left_is_ended(start, tmp_path, caplog):
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    with subprocess.Popen([*sleep, f"--session={tmp_path / 'session'}/x"]) as of_ray, subprocess.Popen(sleep) as other:
        try:
            assert start(LATE, None) == 2
            assert has_ended(of_ray.pid) and other.poll() is None
        finally:
            of_ray.kill()
            other.kill()
    assert "it is started once more" in caplog.text


def test_it_is_not_started_a_third_time(start):
    with pytest.raises(RunError, match="Ray did not start on this machine: The current node timed out"):
        start(LATE, LATE, None)


def test_another_error_is_told_at_once(start):
    with pytest.raises(RunError, match="Ray did not start on this machine: no room for the object store"):
        start(Exception("no room for\nthe object store"), None)


@pytest.mark.full
def test_a_real_one_whose_raylet_is_stopped_is_replaced():
    with tempfile.TemporaryDirectory(prefix="coati-", dir="/tmp") as scratch:
        done = subprocess.run([sys.executable, "-c", REAL, scratch], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "Ray was not ready within the 30 s" in done.stderr
