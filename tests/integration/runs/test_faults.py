"""Test which faults end a run, and that nothing is left behind; most tests use the fake engine."""

import json
import os
import re
import shlex
import signal
import time
from contextlib import suppress

import psutil
import pytest

pytestmark = pytest.mark.full


@pytest.fixture
def long_run(make_tiny, start_run, flags):
    """A run with two producers that is in its second step and would go on for a long time."""

    def start(*more):
        run = start_run(*flags(make_tiny(tied=True), inferencers=2), "-b", "fake", "-e", 1000, *more)
        run.wait_for_step(2)
        run.processes()
        return run

    return start


def test_a_killed_producer_is_replaced_and_ctrl_c_ends_the_run_with_130(long_run):
    run = long_run("--max-steps", 300)
    victim = run.processes("ray::ProducerActor")[0]
    victim.kill()
    step = len(run.records())
    run.wait_until(lambda: any(f"producer {number} lost" in run.text() for number in (0, 1)))
    run.wait_until(lambda: len([p for p in run.processes("ray::ProducerActor") if p.pid != victim.pid]) >= 2)
    run.wait_for_step(step + 20)
    uids = _trained(run)
    assert len(uids) == len(set(uids)), "no prompt was trained twice"
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text()
    assert run.left_over() == []


def _trained(run):
    lines = [json.loads(line) for path in (run.run_dir / "rollouts").iterdir() for line in path.open()]
    return [(line["uid"], line["sample"]) for line in lines if line["is_trained"]]


def _resumes_from(run):
    """The checkpoint's step that the last line tells to resume from, and the flags it gives."""
    last = run.text().splitlines()[-1]
    match = re.search(r"; resume from step (\d+) with: \S*python3? \S*/rl_example.py (.*)$", last)
    assert match, last
    return int(match[1]), shlex.split(match[2])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_a_run_after_the_step_is_saved_and_the_last_line_resumes_it(long_run, start_run, number):
    run = long_run("-si", -1)
    if number == signal.SIGTERM:
        run.process.send_signal(number)
    else:
        os.killpg(run.process.pid, number)  # as a terminal does: to the whole foreground group
    assert run.wait(60) == 130, run.text()
    assert "interrupted; everything was stopped; resume from step" in run.text()
    assert run.left_over() == []
    step, flags = _resumes_from(run)
    assert len(run.records()) == step, "what is saved is recorded, and what is recorded is saved"

    resumed = start_run(*flags, "--max-steps", step + 2)
    assert resumed.wait() == 0, resumed.text()
    assert [record["step"] for record in run.records()] == list(range(1, step + 3))
    uids = _trained(run)
    assert len(uids) == len(set(uids)), "no prompt was trained twice"


@pytest.mark.parametrize("victim", ["rl_example.py", "gcs_server", "raylet"])
def test_a_run_ends_in_time_when_its_driver_or_a_part_of_ray_is_stopped_and_stays_so(long_run, victim):
    run = long_run("--interrupt-grace-s", 6)
    stopped = run.processes(victim)[0]
    stopped.suspend()
    begin = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    while run.process.poll() is None and time.monotonic() - begin < 60:
        with suppress(psutil.NoSuchProcess):
            stopped.suspend()  # the subreaper continues it once
        time.sleep(0.01)
    assert time.monotonic() - begin < 6 + 10
    assert run.wait(0) == 130, run.text()
    assert run.text().splitlines()[-1].startswith("rl_example.py: interrupted")
    assert run.left_over() == []


@pytest.mark.parametrize(
    ("victim", "who"), [("ray::TrainerActor", "trainer-0"), ("ray::CoordinatorActor", "coordinator")]
)
def test_a_dead_trainer_or_coordinator_ends_the_run_with_its_cause_within_a_minute(long_run, victim, who):
    run = long_run()
    run.processes(victim)[0].kill()
    assert run.wait(60) == 1, run.text()
    last = run.text().splitlines()[-1]
    assert who in last and "died" in last and "logs" in last
    assert run.left_over() == []


def test_a_killed_driver_leaves_no_process(long_run):
    run = long_run()
    driver = run.processes("rl_example.py")[0]
    assert driver.pid != run.process.pid, "the subreaper is the process that the user started"
    driver.kill()
    assert run.wait(60) == 1
    last = run.text().splitlines()[-1]
    assert last.startswith("rl_example.py: the run failed: its driver was killed by SIGKILL")
    assert last.endswith("; no checkpoint was written: start it again")
    assert run.left_over() == []


def test_a_killed_parent_process_leaves_no_process(long_run):
    run = long_run()
    run.process.kill()
    run.process.wait(60)
    assert run.left_over(within_s=30) == []


def test_a_run_that_is_interrupted_while_a_tensor_parallel_engine_loads_leaves_nothing(make_tiny, start_run, flags):
    run = start_run(*flags(make_tiny(tied=True)), "-ptp", 2)
    run.wait_until(lambda: any(path.name.startswith("psm_") for path in run.places.left_over()))  # a queue of its ranks
    run.processes()
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text()
    assert run.left_over() == []
