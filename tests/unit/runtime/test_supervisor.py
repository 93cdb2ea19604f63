"""Test that the driver ends after the last event, not with the last trainer, and replaces dead producers."""

import time

import pytest

from coati_rl.coordinator.run_status import RunStatus
from coati_rl.errors import CollectiveError, PeerLostError, RunError
from coati_rl.runtime import supervisor
from coati_rl.runtime.actor_group import ManagedActor
from coati_rl.runtime.supervisor import Supervisor
from tests.unit.runtime.fake_actor_group import FakeActorGroup


@pytest.fixture
def watch(monkeypatch):
    """(actors, what the trainer's end gives) -> the events that the driver saw."""

    def run(actors, wait_for=lambda *_, **__: 2, done_after=2):
        looks = iter(range(100))
        monkeypatch.setattr(
            supervisor.ray,
            "wait",
            lambda refs, **_: (refs, []) if next(looks) >= done_after - 1 else ([], refs),
        )
        monkeypatch.setattr(supervisor, "wait_for", wait_for)
        seen = []
        Supervisor(actors, seen.append, num_producers=1, stall_timeout_s=60.0).run()
        return seen

    return run


def test_a_record_that_comes_while_the_trainers_end_is_not_lost(watch):
    # The trainer ends after the second look at the events; the last record and the end come after that look.
    steps = [[{"event": "step", "step": 1}], [], [{"event": "step", "step": 2}, {"event": "finished"}]]
    assert watch(FakeActorGroup(*steps)) == [event for look in steps for event in look]


class StoppedActorGroup(FakeActorGroup):
    """The trainer ends some looks after it was told to, before the driver's last one."""

    is_stopped = False

    def stop(self):
        self.is_stopped = True

    def wait(self, references, **_):
        return (references, []) if self.is_stopped and len(self.looks) <= 1 else ([], references)


@pytest.fixture
def interrupted(monkeypatch):
    """(actors, deadline in seconds) -> the events that the driver saw of a run that is interrupted and saved."""

    def run(actors, deadline_s):
        monkeypatch.setattr(supervisor.ray, "wait", actors.wait)
        monkeypatch.setattr(supervisor, "wait_for", lambda *_, **__: 2)
        seen = []
        watched = Supervisor(actors, seen.append, num_producers=1, stall_timeout_s=60.0)
        watched.run(lambda: 1.0 if seen else None)
        watched.save(deadline=time.monotonic() + deadline_s)
        return seen

    return run


def test_an_interrupted_run_is_saved_and_no_event_is_lost(interrupted):
    steps = [[{"event": "step", "step": 1}], [], [{"event": "step", "step": 2}], [{"event": "checkpoint", "step": 2}]]
    assert interrupted(StoppedActorGroup(*steps), 60.0) == [event for look in steps for event in look]


def test_a_checkpoint_that_takes_too_long_is_given_up(interrupted):
    with pytest.raises(RunError, match="the checkpoint was not written in time; raise --interrupt-grace-s"):
        interrupted(StoppedActorGroup([{"event": "step", "step": 1}], *[[]] * 9), -1.0)


def test_a_trainer_that_fails_is_the_cause(watch):
    def fail(*_, **__):
        raise RunError("out of memory")

    with pytest.raises(RunError, match="out of memory"):
        watch(FakeActorGroup(), wait_for=fail)


def test_a_dead_raylet_is_the_cause_of_whatever_died_with_it(watch):
    def fail(*_, **__):
        raise PeerLostError("trainer-0 died: connection reset")

    actors = FakeActorGroup()
    actors.raylets_lost = ["10.0.0.7"]
    expected = "Ray's raylet at 10.0.0.7 is dead, and the actors there with it: trainer-0 died: connection reset"
    with pytest.raises(RunError, match=expected):
        watch(actors, wait_for=fail)


def test_of_trainers_that_fail_together_the_one_that_lost_no_peer_is_the_cause(watch):
    # Its end takes the others' collectives down.
    causes = {"trainer-0": PeerLostError("a collective was broken off"), "trainer-1": RunError("out of memory")}
    actors = FakeActorGroup()
    actors.trainers = {rank: ManagedActor(name=name, handle=None, task=name) for rank, name in enumerate(causes)}

    def fail(reference, **_):
        raise causes[reference]

    with pytest.raises(RunError, match="out of memory"):
        watch(actors, wait_for=fail)


def test_a_trainer_that_died_is_the_cause_and_not_the_one_whose_collective_broke(watch):
    causes = {"trainer-0": CollectiveError("could not sum gradients"), "trainer-1": PeerLostError("trainer-1 died")}
    actors = FakeActorGroup()
    actors.trainers = {rank: ManagedActor(name=name, handle=None, task=name) for rank, name in enumerate(causes)}

    def fail(reference, **_):
        raise causes[reference]

    with pytest.raises(PeerLostError, match="trainer-1 died"):
        watch(actors, wait_for=fail)


def test_a_failed_trainer_is_told_when_the_others_had_time_to_fail_too(monkeypatch):
    # Ray reports the end of trainer-1, which was killed, a moment after that of trainer-0, which noticed it.
    causes = {"trainer-0": CollectiveError("could not sum gradients"), "trainer-1": PeerLostError("trainer-1 died")}
    actors = FakeActorGroup()
    actors.trainers = {rank: ManagedActor(name=name, handle=None, task=name) for rank, name in enumerate(causes)}

    def wait(references, *, timeout, **_):
        return (references, []) if timeout else (references[:1], references[1:])

    def fail(reference, **_):
        raise causes[reference]

    monkeypatch.setattr(supervisor.ray, "wait", wait)
    monkeypatch.setattr(supervisor, "wait_for", fail)
    with pytest.raises(PeerLostError, match="trainer-1 died"):
        Supervisor(actors, lambda event: None, num_producers=1, stall_timeout_s=60.0).run()


class ProducerActorGroup(FakeActorGroup):
    """One producer at a time, that is dead when the driver looks, or works if its number is not among `dead`.

    The trainer ends when there are no looks left.
    """

    def __init__(self, *looks, dead=(), dead_at_start=(), idle_s=0.0):
        super().__init__(*looks)
        self.dead, self.dead_at_start, self.idle_s = dead, dead_at_start, idle_s
        self.dropped = []
        self.num_made = 0
        self.add_producer()

    def add_producer(self):
        name = f"producer-{self.num_made}"
        self.starting[self.num_made] = ManagedActor(name=name, handle=None, task=("start", self.num_made))
        self.num_made += 1

    def admit_producer(self, producer_id):
        member = self.starting.pop(producer_id)
        self.producers[producer_id] = ManagedActor(name=member.name, handle=None, task=("run", producer_id))

    def drop_producer(self, producer_id, cause):
        self.dropped.append((producer_id, cause))
        del (self.starting if producer_id in self.starting else self.producers)[producer_id]

    def status(self):
        return RunStatus(idle_s=self.idle_s, text="waiting for rollouts")

    def wait(self, references, **_):
        done = [reference for reference in references if self._is_done(reference)]
        return done, [reference for reference in references if reference not in done]

    def _is_done(self, reference):
        if reference == "task":
            return not self.looks
        call, number = reference
        return call == "start" or number in self.dead

    def wait_for(self, reference, **_):
        call, number = reference if reference != "task" else ("run", None)
        if number in (self.dead if call == "run" else self.dead_at_start):
            raise RunError("out of memory")


@pytest.fixture
def supervise(monkeypatch):
    """A actors of one producer, watched until the trainer ends."""

    def run(actors):
        monkeypatch.setattr(supervisor.ray, "wait", actors.wait)
        monkeypatch.setattr(supervisor, "wait_for", actors.wait_for)
        Supervisor(actors, lambda event: None, num_producers=1, stall_timeout_s=60.0).run()
        return actors

    return run


NOTHING, STEP = [], [{"event": "step", "step": 1}]
LOST = [{"event": "producer_lost", "producer": 0, "cause": "no answer"}]


@pytest.mark.parametrize("when", ["dead", "dead_at_start"])
def test_a_producer_that_dies_is_dropped_with_its_cause_and_replaced_once(supervise, when):
    actors = supervise(ProducerActorGroup(*[NOTHING] * 6, **{when: {0}}))
    assert actors.dropped == [(0, "out of memory")]
    assert list(actors.producers) == [1]
    assert actors.num_made == 2


def test_a_producer_that_a_weight_sync_found_dead_is_replaced(supervise):
    actors = supervise(ProducerActorGroup(NOTHING, LOST, *[NOTHING] * 3))
    assert actors.dropped == [(0, "no answer")]
    assert list(actors.producers) == [1]


def test_producers_that_die_one_after_another_end_the_run(supervise):
    assert supervisor.MAX_REPLACEMENTS == 3
    with pytest.raises(RunError, match="producer-3: out of memory; 3 replacements failed before it"):
        supervise(ProducerActorGroup(*[NOTHING] * 12, dead=range(9)))


def test_an_optimizer_step_in_between_allows_as_many_replacements_again(supervise):
    # Three producers die before the step, as many as may; three after it, and the seventh lives.
    actors = supervise(ProducerActorGroup(*[NOTHING] * 3, STEP, *[NOTHING] * 8, dead=range(6)))
    assert [number for number, _ in actors.dropped] == [0, 1, 2, 3, 4, 5]
    assert list(actors.producers) == [6]


def test_a_producer_that_does_not_load_in_time_is_replaced(supervise, monkeypatch):
    actors = ProducerActorGroup(*[NOTHING] * 4)
    actors._is_done = lambda reference: not actors.looks if reference == "task" else reference == ("start", 1)
    clock = iter(range(0, 1_000_000, int(supervisor.START_TIMEOUT_S) // 2))
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: next(clock))
    supervise(actors)
    assert actors.dropped == [(0, "not ready after 600 s")]


def test_a_run_without_progress_is_ended(supervise):
    with pytest.raises(
        RunError, match=r"sync was finished for 60 s: waiting for rollouts \(trainer-0: wait for work\)"
    ):
        supervise(ProducerActorGroup(NOTHING, NOTHING, idle_s=61.0))


@pytest.mark.parametrize("when", ["running", "starting"])
def test_a_producer_that_hangs_is_replaced_with_its_cause(supervise, when):
    actors = ProducerActorGroup(*[NOTHING] * 5)
    if when == "starting":
        actors._is_done = lambda reference: not actors.looks if reference == "task" else reference == ("start", 1)
    actors.heartbeats.hung = {"producer-0": "no sign of life for 31 s"}
    supervise(actors)
    assert actors.dropped == [(0, "no sign of life for 31 s")]
    assert list(actors.producers) == [1]
    assert actors.heartbeats.names == ["trainer-0", "producer-1"]


def test_a_trainer_that_hangs_ends_the_run_by_name(supervise):
    actors = ProducerActorGroup(*[NOTHING] * 5)
    actors.heartbeats.trainer = "trainer-0 hangs: no sign of life for 31 s"
    with pytest.raises(RunError, match="trainer-0 hangs: no sign of life for 31 s"):
        supervise(actors)


def test_a_reward_model_that_hangs_ends_the_run_with_its_name(watch):
    actors = FakeActorGroup()
    actors.reward_models = [ManagedActor(name="reward-model-0", handle=None, task="scoring")]
    actors.heartbeats.hung = {"reward-model-0": "no sign of life for 60 s"}
    with pytest.raises(RunError, match="reward-model-0 hangs: no sign of life for 60 s; the run waits for its scores"):
        watch(actors, done_after=100)


def test_a_reward_model_that_dies_ends_the_run_with_its_cause(monkeypatch):
    actors = FakeActorGroup()
    actors.reward_models = [ManagedActor(name="reward-model-0", handle=None, task="scoring")]
    # The trainer goes on, and the model's task has ended.
    monkeypatch.setattr(supervisor.ray, "wait", lambda refs, **_: (refs, []) if refs == ["scoring"] else ([], refs))

    def die(reference, *, who, timeout_s):
        raise PeerLostError(f"{who} died: out of memory")

    monkeypatch.setattr(supervisor, "wait_for", die)
    message = "reward-model-0 died: out of memory; without it no response can be scored"
    with pytest.raises(RunError, match=message):
        Supervisor(actors, lambda event: None, num_producers=1, stall_timeout_s=60.0).run()
