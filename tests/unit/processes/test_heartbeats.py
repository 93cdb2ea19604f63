"""Test heartbeats: silence counts from the last answer while the observer runs; silent actors are killed."""

import subprocess
import sys
import time

import psutil
import pytest
from ray.exceptions import RayActorError

from coati_rl.errors import PeerLostError
from coati_rl.observability.phases import Phase
from coati_rl.observability.running_clock import RunningClock
from coati_rl.processes.hangs import HangTimeouts
from coati_rl.processes.heartbeats import Heartbeat, Heartbeats, end_process
from coati_rl.runtime import ray_heartbeats
from tests.ended import has_ended

NODE = "ab" * 28
PATIENCE = HangTimeouts(heartbeat_s=30.0, phase_s=60.0)


class Actors:
    """Actors that answer, are silent or dead; and a clock. The handle of each is its name."""

    def __init__(self):
        self.now = 0.0
        self.silent, self.dead, self.phases = set(), set(), ()
        self.num_asked = 0
        self.heartbeats = Heartbeats(
            PATIENCE,
            ask=self.ask,
            answer=self.answer,
            here="elsewhere",
            end_there=ray_heartbeats._end_there,
            clock=RunningClock(lambda: self.now),
        )

    def ask(self, handle):
        self.num_asked += 1
        return handle

    def answer(self, reference):
        if reference in self.dead:
            raise PeerLostError(reference)
        beat = Heartbeat(pid=-1, started_at=0.0, node_id=NODE, phases=self.phases)
        return None if reference in self.silent else beat

    def run(self, seconds, names=("producer-0", "trainer-0")):
        for _ in range(4 * seconds):
            self.now += 0.25
            self.heartbeats.poll({name: name for name in names})


@pytest.fixture
def actors():
    actors = Actors()
    actors.run(5)
    return actors


def test_everyone_is_asked_once_a_second(actors):
    before = actors.num_asked
    actors.run(8)
    assert actors.num_asked - before == pytest.approx(2 * 8, abs=4)
    assert actors.heartbeats.producer_problem("producer-0") is None
    assert actors.heartbeats.trainers_problem(["trainer-0"]) is None


def test_twenty_seconds_of_silence_are_survived_and_thirty_one_are_a_hang(actors):
    actors.silent = {"producer-0", "trainer-0"}
    actors.run(20)
    assert actors.heartbeats.producer_problem("producer-0") is None
    assert actors.heartbeats.trainers_problem(["trainer-0"]) is None
    actors.run(12)
    assert "no sign of life for 3" in actors.heartbeats.producer_problem("producer-0")
    problem = actors.heartbeats.trainers_problem(["trainer-0"])
    assert problem.startswith("trainer-0 hangs: no sign of life for 3") and problem.endswith("; the run waits for it")


def test_a_stop_of_the_observer_is_nobodys_silence(actors):
    actors.silent = {"producer-0", "trainer-0"}
    actors.now += 75.0
    actors.run(20)
    assert actors.heartbeats.producer_problem("producer-0") is None
    assert actors.heartbeats.trainers_problem(["trainer-0"]) is None


def test_silence_ends_with_an_answer(actors):
    for _ in range(3):
        actors.silent = {"producer-0"}
        actors.run(25)
        actors.silent = set()
        actors.run(2)
    assert actors.heartbeats.producer_problem("producer-0") is None


def test_an_actor_that_has_never_answered_is_still_starting(actors):
    actors.silent = {"producer-7"}
    actors.run(100, names=("producer-0", "producer-7", "trainer-0"))
    assert actors.heartbeats.producer_problem("producer-7") is None


def test_a_dead_actor_is_left_to_those_who_know_its_cause(actors):
    actors.dead = {"producer-0"}
    actors.run(100)
    assert actors.heartbeats.producer_problem("producer-0") is None


def test_a_silent_actor_is_told_with_what_it_did_last(actors):
    actors.phases = (Phase(name="engine step", path="engine step", item=None, seconds=1.0, median_s=1.0),)
    actors.run(2)
    assert actors.heartbeats.describe_phases() == "producer-0: engine step; trainer-0: engine step"
    actors.silent = {"producer-0"}
    actors.run(32)
    assert actors.heartbeats.producer_problem("producer-0").endswith("; it was in 'engine step'")


def test_a_phase_over_its_limit_is_a_hang_of_one_that_answers(actors):
    actors.phases = (Phase(name="train", path="train (step 2)", item=1, seconds=61.0, median_s=0.1),)
    actors.run(2)
    assert "'train (step 2)' is not done after 61 s" in actors.heartbeats.trainers_problem(["trainer-0"])


def test_a_silent_process_of_another_node_is_ended_there_when_the_run_ends(actors, monkeypatch):
    calls, waits = [], []

    class Task:
        def options(self, *, num_cpus, scheduling_strategy):
            self.strategy = scheduling_strategy
            assert num_cpus == 0
            return self

        def remote(self, *process):
            calls.append((self.strategy.node_id, process))
            return "reference"

    monkeypatch.setattr(ray_heartbeats.ray, "remote", lambda function: function is end_process and Task())
    monkeypatch.setattr(ray_heartbeats, "ready", lambda references, *, timeout_s: waits.append(references))
    actors.heartbeats.end_silent()
    assert calls == []
    actors.silent = {"trainer-0"}
    actors.run(32)
    actors.heartbeats.end_silent()
    assert calls == [(NODE, (-1, 0.0))], "the node and the process of trainer-0"
    assert waits == [["reference"]]


def test_rays_word_that_an_actor_is_dead_is_a_lost_peer(monkeypatch):
    def get(reference, *, timeout):
        raise RayActorError

    monkeypatch.setattr(ray_heartbeats.ray, "get", get)
    with pytest.raises(PeerLostError):
        ray_heartbeats._answer("reference")


@pytest.fixture
def family():
    """A stopped process with a child."""
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    process = subprocess.Popen([sys.executable, "-c", f"{code}print(flush=True); time.sleep(600)"], stdout=-1)
    process.stdout.readline()
    parent = psutil.Process(process.pid)
    members = [parent, *parent.children()]
    assert len(members) == 2
    parent.suspend()
    yield members
    for member in members:
        if member.is_running():
            member.kill()
    process.wait()


def test_a_stopped_process_is_ended_with_its_children(family):
    end_process(family[0].pid, family[0].create_time())
    deadline = time.monotonic() + 60
    while not all(has_ended(member) for member in family):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_another_process_that_has_the_number_by_now_is_left_alone(family):
    end_process(family[0].pid, family[0].create_time() - 1.0)
    ended, alive = psutil.wait_procs(family, timeout=0.5)
    assert ended == [] and len(alive) == 2
