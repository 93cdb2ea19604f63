"""Test that stopped or hanging processes are found within their deadline, named, and replaced or end the run.

A stopped producer and a loss that never returns are in the run of test_updates.py.
"""

import os
import signal
import time

import pytest

from tests.faults.conftest import HEARTBEAT_S, PHASE_S, endless_run


@pytest.fixture
def long_run(make_tiny, start_run, flags, tmp_path):
    """(flags) -> a run in its third step that would go on for long, and the file that makes a trainer's loss hang."""

    def start(*more, **sizes):
        cue, endless = endless_run(tmp_path)
        run = start_run(*flags(make_tiny(tied=True), **sizes), "-b", "fake", *endless, *more)
        run.wait_for_step(3)
        return run, cue

    return start


@pytest.mark.full
def test_a_stopped_trainer_ends_the_run_by_name(long_run):
    run, _ = long_run(trainers=2)
    victim = run.processes("ray::FaultyTrainer")[0]
    victim.suspend()
    assert run.wait(HEARTBEAT_S + 60) == 1, run.text()
    last = run.text().splitlines()[-1]
    assert "hangs: no sign of life for 1" in last and f"its process {victim.pid} is stopped; it was in '" in last
    assert run.left_over() == []


@pytest.mark.full
def test_of_two_trainers_the_one_whose_loss_never_returns_is_named(long_run):
    run, cue = long_run(trainers=2)
    cue.write_text("1")
    assert run.wait(PHASE_S + 90) == 1, run.text()
    last = run.text().splitlines()[-1]
    assert "trainer-1 hangs: " in last and "in policy_loss" in last and "trainer-0 (train (step " in last
    assert run.left_over() == []


@pytest.mark.full
def test_a_run_that_the_terminal_stops_for_long_goes_on(long_run):
    run, _ = long_run("--heartbeat-timeout-s", 30)
    os.killpg(run.process.pid, signal.SIGSTOP)
    time.sleep(75)
    os.killpg(run.process.pid, signal.SIGCONT)
    run.wait_for_step(len(run.records()) + 5)
    assert "lost" not in run.text()
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.text()


@pytest.mark.full
def test_producers_and_trainers_that_stop_for_fifteen_seconds_go_on(long_run):
    run, _ = long_run("--heartbeat-timeout-s", 30, inferencers=2)
    for kind in ("FaultyProducer", "FaultyTrainer", "CoordinatorActor"):
        process = run.processes(f"ray::{kind}")[0]
        process.suspend()
        time.sleep(15)
        process.resume()
        run.wait_for_step(len(run.records()) + 2)
    assert "lost" not in run.text()


@pytest.mark.full
def test_a_dead_raylet_is_called_so(long_run):
    run, _ = long_run()
    next(process for process in run.processes() if process.name() == "raylet").kill()
    assert run.wait(60) == 1, run.text()
    last = run.text().splitlines()[-1]
    assert "the run failed: Ray's raylet at " in last and " is dead, and the actors there with it: " in last
    assert run.left_over() == []
