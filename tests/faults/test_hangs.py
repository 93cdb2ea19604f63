"""Test that stopped or hanging processes are found within their deadline, named, and replaced or end the run."""

import os
import signal
import time

import psutil
import pytest

HEARTBEAT_S, PHASE_S = 10, 8

LOSS = """
import time
from pathlib import Path

def policy_loss(logprobs, old_logprobs, advantages, micro_batch):
    import torch.distributed as dist
    while (cue := Path({cue!r})).exists() and cue.read_text() == str(dist.get_rank()):
        time.sleep(0.1)
    return -(logprobs - old_logprobs).exp() * advantages
"""


@pytest.fixture
def long_run(make_tiny, start_run, flags, tmp_path):
    """(flags) -> a run in its third step that would go on for long, and the file that makes a trainer's loss hang."""

    def start(*more, **sizes):
        cue, loss = tmp_path / "cue", tmp_path / "own_loss.py"
        loss.write_text(LOSS.format(cue=str(cue)))
        job = [*flags(make_tiny(tied=True), **sizes), "-b", "fake", "-e", 1000, "--max-steps", 1000]
        deadlines = ["--heartbeat-timeout-s", HEARTBEAT_S, "--phase-timeout-s", PHASE_S]
        run = start_run(*job, *deadlines, "--policy-loss", f"{loss}:policy_loss", *more)
        run.wait_for_step(3)
        return run, cue

    return start


def wait_for_text(run, text, timeout_s):
    deadline = time.monotonic() + timeout_s
    while text not in run.text():
        assert run.process.poll() is None, run.text()
        assert time.monotonic() < deadline, run.text()
        time.sleep(0.2)


def assert_ended(process):
    """Gone, or dead and not yet waited for."""
    deadline = time.monotonic() + 15
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, process
        time.sleep(0.1)


def assert_trained_once(run):
    trained = [(row["uid"], row["sample"]) for row in run.rollouts() if row["is_trained"]]
    assert len(trained) == len(set(trained)) > 0


def test_a_stopped_producer_is_replaced_and_ended_and_a_loss_that_never_returns_ends_the_run_by_name(long_run):
    run, cue = long_run()
    (producer,) = run.processes("ray::FaultyProducer")
    producer.suspend()
    wait_for_text(run, "producer 0 lost: no sign of life for", timeout_s=HEARTBEAT_S + 60)
    assert f"its process {producer.pid} is stopped" in run.text()
    assert "\nwaiting for " in run.text(), "rollouts, or its part of a weight sync"
    assert_ended(producer)
    run.wait_for_step(len(run.records()) + 2)

    cue.write_text("0")
    assert run.wait(PHASE_S + 60) == 1, run.text()
    assert f"step {len(run.records()) + 1} is being trained; " in run.text()

    last = run.text().splitlines()[-1]
    assert f"trainer-0 hangs: 'train (step {len(run.records()) + 1}) > forward_backward' is not done after" in last
    assert "at own_loss.py:8 in policy_loss" in last and "; the run waits for it" in last
    assert_trained_once(run)
    assert run.left_over() == []


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
