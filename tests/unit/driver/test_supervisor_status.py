"""Test that the driver forwards what a run waits for, and ends when all records are written."""

import pytest

from coati_rl.driver import supervisor
from coati_rl.driver.supervisor import Supervisor
from coati_rl.errors import RunError
from tests.unit.driver.fake_actor_group import FakeActorGroup, FakeMember


def watch(actors):
    """Return the events and the texts that the driver saw."""
    events, texts = [], []
    actors.done_after = 4
    Supervisor(actors, events.append, num_producers=1, stall_timeout_s=60.0, on_status=texts.append).run()
    return events, texts


class SlowDisk(FakeActorGroup):
    """Tells of the last evaluation when its files are written."""

    def flush(self, *, timeout_s):
        assert timeout_s >= 30.0
        self.happened.append({"event": "evaluation", "step": 2})


def test_a_run_is_over_when_its_records_are_written():
    assert watch(SlowDisk([{"event": "step", "step": 1}]))[0][-1] == {"event": "evaluation", "step": 2}


def test_what_the_disk_refuses_at_the_end_is_the_cause():
    actors = FakeActorGroup()

    def flush(*, timeout_s):
        raise RunError("runs/a/rollouts cannot be written: No space left on device")

    actors.flush = flush
    with pytest.raises(RunError, match="rollouts cannot be written"):
        watch(actors)


def test_what_the_run_waits_for_is_passed_on_with_every_look():
    _, texts = watch(FakeActorGroup())
    assert len(texts) >= 2 and set(texts) == {"waiting for rollouts"}


@pytest.mark.parametrize("problem", [None, "the coordinator died", "runs/a/rollouts cannot be written"])
def test_a_run_that_failed_keeps_the_records_that_can_be_kept(problem):
    actors, asked = FakeActorGroup(), []

    def flush(*, timeout_s):
        asked.append(timeout_s)
        if problem:
            raise RunError(problem)

    actors.flush = flush
    Supervisor(actors, lambda event: None, num_producers=1, stall_timeout_s=60.0).flush_records()
    assert asked == [supervisor.KEEP_S]


def test_producers_that_load_their_engine_are_counted(monkeypatch):
    actors = FakeActorGroup()
    actors.starting = {1: FakeMember("producer-1")}
    actors.producers = {0: FakeMember("producer-0")}
    monkeypatch.setattr(supervisor.Supervisor, "_admit_started", lambda self: None)
    monkeypatch.setattr(supervisor.Supervisor, "_replace_dead", lambda self: None)
    _, texts = watch(actors)
    assert set(texts) == {"1 of 2 producers loading the model; waiting for rollouts"}
