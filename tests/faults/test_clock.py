"""Test that waits for Ray end in time when the machine's clock is set back meanwhile, by an hour."""

import json
import random
import subprocess
import sys

import pytest
from soak_faults import MachineFaults

from tests.integration.runs.conftest import ROOT

pytestmark = pytest.mark.full
PROGRAM = """
import json, os, struct, sys, threading, time

import ray
from ray.exceptions import GetTimeoutError

from coati_rl.runtime.waits import as_ready, ready, result


def set_clock(hours):
    with open(os.environ["COATI_SOAK_FAULTS"], "r+b", buffering=0) as file:
        file.write(struct.pack("<qq", 0, int(hours * 3600e9)))


def seconds(wait):
    set_clock(0)
    threading.Timer(0.5, set_clock, (-1,)).start()
    before, date = time.monotonic(), time.time()
    try:
        wait()
    except GetTimeoutError:
        pass
    took, went = time.monotonic() - before, time.time() - date
    set_clock(0)
    return took, went


ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
sleeps = ray.remote(num_cpus=0)(lambda: time.sleep(600)).remote()
waits = (
    lambda: result(sleeps, timeout_s=1.0),
    lambda: ready([sleeps], timeout_s=1.0),
    lambda: [*as_ready([sleeps], timeout_s=1.0)],
)
print(json.dumps([seconds(wait) for wait in waits]))
"""


def test_a_wait_for_ray_ends_in_time_when_the_clock_is_set_back(tmp_path):
    faults = MachineFaults(tmp_path, random.Random(0))
    environment = {**faults.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for took, went in json.loads(done.stdout.splitlines()[-1]):
        assert 1.0 <= took < 10.0
        assert went < -3500, "the clock was set back meanwhile"
