"""The driver ends after the last event, not with the last trainer."""

import pytest

from coati_rl.errors import RunError
from coati_rl.runtime import supervisor
from coati_rl.runtime.crew import Member
from coati_rl.runtime.supervisor import Supervisor


class FakeCrew:
    """One trainer; events as they are after each look."""

    def __init__(self, *looks):
        self.looks = list(looks)
        self.happened = []
        self.coordinator = self
        self.trainers = {0: Member(name="trainer-0", handle=None, task="task")}
        self.starting, self.producers = {}, {}
        self.is_done = False

    def events(self, after, *, timeout_s):
        self.happened += self.looks.pop(0) if self.looks else []
        return self.happened[after:]

    def seconds_since_progress(self):
        return 0.0


@pytest.fixture
def watch(monkeypatch):
    """(crew, what the trainer's end gives) -> the events that the driver saw."""

    def run(crew, wait_for=lambda *_, **__: 2, done_after=2):
        looks = iter(range(100))
        monkeypatch.setattr(
            supervisor.ray,
            "wait",
            lambda refs, **_: (refs, []) if next(looks) >= done_after - 1 else ([], refs),
        )
        monkeypatch.setattr(supervisor, "wait_for", wait_for)
        seen = []
        Supervisor(crew, seen.append, num_producers=1, stall_timeout_s=60.0).run()
        return seen

    return run


def test_a_record_that_comes_while_the_trainers_end_is_not_lost(watch):
    # The trainer ends after the second look at the events; the last record and the end come after that look.
    steps = [[{"event": "step", "step": 1}], [], [{"event": "step", "step": 2}, {"event": "finished"}]]
    assert watch(FakeCrew(*steps)) == [event for look in steps for event in look]


def test_a_trainer_that_fails_is_the_cause(watch):
    def fail(*_, **__):
        raise RunError("out of memory")

    with pytest.raises(RunError, match="out of memory"):
        watch(FakeCrew(), wait_for=fail)
