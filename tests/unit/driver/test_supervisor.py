"""Test that the driver ends after the last event, not with the last trainer, and replaces dead producers."""

import time

import pytest

from coati_rl.coordinator.run_status import RunStatus
from coati_rl.driver import supervisor
from coati_rl.driver.supervisor import Supervisor
from coati_rl.errors import CollectiveError, PeerLostError, RunError
from tests.unit.driver.fake_actor_group import FakeActorGroup, FakeMember


def watch(actors):
    """Return the events that the driver saw."""
    seen = []
    Supervisor(actors, seen.append, num_producers=1, stall_timeout_s=60.0).run()
    return seen


def test_a_record_that_comes_while_the_trainers_end_is_not_lost():
    # The trainer ends after the second look at the events; the last record and the end come after that look.
    steps = [[{"event": "step", "step": 1}], [], [{"event": "step", "step": 2}, {"event": "finished"}]]
    assert watch(FakeActorGroup(*steps)) == [event for look in steps for event in look]


class StoppedActorGroup(FakeActorGroup):
    """The trainer ends some looks after it was told to, before the driver's last one."""

    is_stopped = False

    def stop(self):
        self.is_stopped = True

    def trainer_ends(self):
        return self.is_stopped and len(self.looks) <= 1


def interrupted(actors, deadline_s):
    """Return the events that the driver saw of a run that is interrupted, and saved within so many seconds."""
    seen = []
    watched = Supervisor(actors, seen.append, num_producers=1, stall_timeout_s=60.0)
    watched.run(lambda: 1.0 if seen else None)
    watched.save(deadline=time.monotonic() + deadline_s)
    return seen


def test_an_interrupted_run_is_saved_and_no_event_is_lost():
    steps = [[{"event": "step", "step": 1}], [], [{"event": "step", "step": 2}], [{"event": "checkpoint", "step": 2}]]
    assert interrupted(StoppedActorGroup(*steps), 60.0) == [event for look in steps for event in look]


def test_a_checkpoint_that_takes_too_long_is_given_up():
    with pytest.raises(RunError, match="the checkpoint was not written in time; raise --interrupt-grace-s"):
        interrupted(StoppedActorGroup([{"event": "step", "step": 1}], *[[]] * 9), -1.0)


def test_a_trainer_that_fails_is_the_cause():
    with pytest.raises(RunError, match="out of memory"):
        watch(FakeActorGroup(error=RunError("out of memory")))


def test_a_dead_raylet_is_the_cause_of_whatever_died_with_it():
    actors = FakeActorGroup(error=PeerLostError("trainer-0 died: connection reset"))
    actors.raylets_lost = ["10.0.0.7"]
    expected = "Ray's raylet at 10.0.0.7 is dead, and the actors there with it: trainer-0 died: connection reset"
    with pytest.raises(RunError, match=expected):
        watch(actors)


def with_trainers(*errors, ends=lambda rank: True):
    """Actors of trainers that fail with these errors, once `ends` says so of their rank."""
    actors = FakeActorGroup()
    actors.trainers = {
        rank: FakeMember(f"trainer-{rank}", ends=lambda rank=rank: ends(rank), error=error)
        for rank, error in enumerate(errors)
    }
    return actors


def test_of_trainers_that_fail_together_the_one_that_lost_no_peer_is_the_cause():
    # Its end takes the others' collectives down.
    with pytest.raises(RunError, match="out of memory"):
        watch(with_trainers(PeerLostError("a collective was broken off"), RunError("out of memory")))


def test_a_trainer_that_died_is_the_cause_and_not_the_one_whose_collective_broke():
    with pytest.raises(PeerLostError, match="trainer-1 died"):
        watch(with_trainers(CollectiveError("could not sum gradients"), PeerLostError("trainer-1 died")))


def test_a_failed_trainer_is_told_when_the_others_had_time_to_fail_too():
    # The end of trainer-1, which was killed, is known a moment after that of trainer-0, which noticed it.
    begin = time.monotonic()
    causes = CollectiveError("could not sum gradients"), PeerLostError("trainer-1 died")
    with pytest.raises(PeerLostError, match="trainer-1 died"):
        watch(with_trainers(*causes, ends=lambda rank: rank == 0 or time.monotonic() > begin + 0.3))


def test_other_trainers_are_waited_for_no_longer_than_that(monkeypatch):
    monkeypatch.setattr(supervisor, "CAUSE_WAIT_S", 0.2)
    causes = CollectiveError("could not sum gradients"), None
    with pytest.raises(CollectiveError, match="could not sum gradients"):
        watch(with_trainers(*causes, ends=lambda rank: rank == 0))


class ProducerActorGroup(FakeActorGroup):
    """One producer at a time, that is dead when the driver looks, or works if its number is not among `dead`.

    The trainer ends when there are no looks left.
    """

    def __init__(self, *looks, dead=(), dead_at_start=(), idle_s=0.0, joined=()):
        super().__init__(*looks)
        self.joined = joined  # over HTTPS
        self.dead, self.dead_at_start, self.idle_s = dead, dead_at_start, idle_s
        self.dropped = []
        self.num_made = 0
        self.add_producer()

    def add_producer(self):
        name = f"producer-{self.num_made}"
        self.starting[self.num_made] = self._member(name, "start", self.num_made)
        self.num_made += 1

    def admit_producer(self, producer_id):
        member = self.starting.pop(producer_id)
        self.producers[producer_id] = self._member(member.name, "run", producer_id)

    def drop_producer(self, producer_id, cause):
        self.dropped.append((producer_id, cause))
        del (self.starting if producer_id in self.starting else self.producers)[producer_id]

    def status(self):
        return RunStatus(idle_s=self.idle_s, text="waiting for rollouts")

    def _member(self, name, call, number):
        fails = number in (self.dead if call == "run" else self.dead_at_start)
        error = RunError("out of memory") if fails else None
        return FakeMember(name, ends=lambda: self.call_ends(call, number), error=error, is_joined=number in self.joined)

    def call_ends(self, call, number):
        return call == "start" or number in self.dead

    def trainer_ends(self):
        return not self.looks


def supervise(actors):
    """Watch the actors of one producer until the trainer ends."""
    watch(actors)
    return actors


NOTHING, STEP = [], [{"event": "step", "step": 1}]
LOST = [{"event": "producer_lost", "producer": 0, "cause": "no answer"}]


@pytest.mark.parametrize("when", ["dead", "dead_at_start"])
def test_a_producer_that_dies_is_dropped_with_its_cause_and_replaced_once(when):
    actors = ProducerActorGroup(*[NOTHING] * 6, **{when: {0}})
    told = [(event["event"], event["cause"]) for event in watch(actors)]
    assert told == [("producer_lost", "out of memory")] * (when == "dead_at_start"), "else the coordinator tells"
    assert actors.dropped == [(0, "out of memory")]
    assert list(actors.producers) == [1]
    assert actors.num_made == 2


def test_a_producer_that_had_joined_over_https_is_lost_and_not_replaced():
    actors = supervise(ProducerActorGroup(*[NOTHING] * 6, dead={0}, joined={0}))
    assert actors.dropped == [(0, "out of memory")], "as lost: its prompts were not given back"
    assert actors.num_made == 1


def test_a_producer_that_a_weight_sync_found_dead_is_replaced():
    actors = supervise(ProducerActorGroup(NOTHING, LOST, *[NOTHING] * 3))
    assert actors.dropped == [(0, "no answer")]
    assert list(actors.producers) == [1]


def test_producers_that_die_one_after_another_end_the_run():
    assert supervisor.MAX_REPLACEMENTS == 3
    with pytest.raises(RunError, match="producer-3: out of memory; 3 replacements failed before it"):
        supervise(ProducerActorGroup(*[NOTHING] * 12, dead=range(9)))


def test_an_optimizer_step_in_between_allows_as_many_replacements_again():
    # Three producers die before the step, as many as may; three after it, and the seventh lives.
    actors = supervise(ProducerActorGroup(*[NOTHING] * 3, STEP, *[NOTHING] * 8, dead=range(6)))
    assert [number for number, _ in actors.dropped] == [0, 1, 2, 3, 4, 5]
    assert list(actors.producers) == [6]


def test_a_producer_that_does_not_load_in_time_is_replaced(monkeypatch):
    actors = ProducerActorGroup(*[NOTHING] * 4)
    actors.call_ends = lambda call, number: (call, number) == ("start", 1)
    clock = iter(range(0, 1_000_000, int(supervisor.START_TIMEOUT_S) // 2))
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: next(clock))
    supervise(actors)
    assert actors.dropped == [(0, "not ready after 600 s")]


def test_a_run_without_progress_is_ended():
    with pytest.raises(
        RunError, match=r"sync was finished for 60 s: waiting for rollouts \(trainer-0: wait for work\)"
    ):
        supervise(ProducerActorGroup(NOTHING, NOTHING, idle_s=61.0))


@pytest.mark.parametrize("when", ["running", "starting"])
def test_a_producer_that_hangs_is_replaced_with_its_cause(when):
    actors = ProducerActorGroup(*[NOTHING] * 5)
    if when == "starting":
        actors.call_ends = lambda call, number: (call, number) == ("start", 1)
    actors.heartbeats.hung = {"producer-0": "no sign of life for 31 s"}
    supervise(actors)
    assert actors.dropped == [(0, "no sign of life for 31 s")]
    assert list(actors.producers) == [1]
    assert actors.heartbeats.names == ["trainer-0", "producer-1"]


def test_a_trainer_that_hangs_ends_the_run_by_name():
    actors = ProducerActorGroup(*[NOTHING] * 5)
    actors.heartbeats.trainer = "trainer-0 hangs: no sign of life for 31 s"
    with pytest.raises(RunError, match="trainer-0 hangs: no sign of life for 31 s"):
        supervise(actors)


def test_a_scorer_that_hangs_or_dies_ends_the_run_with_its_name():
    actors = FakeActorGroup(done_after=100)
    actors.scorers = [FakeMember("scorer-0"), FakeMember("scorer-1")]
    actors.heartbeats.hung = {"scorer-1": "no sign of life for 60 s"}
    with pytest.raises(RunError, match="scorer-1 hangs: no sign of life for 60 s; the run waits for its scores"):
        watch(actors)
    actors, died = FakeActorGroup(done_after=100), PeerLostError("scorer-0 died: killed")
    actors.scorers = [FakeMember("scorer-0", ends=lambda: True, error=died)]
    with pytest.raises(RunError, match="scorer-0 died: killed; without it reference and teacher cannot be compared"):
        watch(actors)


def test_a_reward_model_that_hangs_ends_the_run_with_its_name():
    actors = FakeActorGroup(done_after=100)
    actors.reward_models = [FakeMember("reward-model-0")]
    actors.heartbeats.hung = {"reward-model-0": "no sign of life for 60 s"}
    with pytest.raises(RunError, match="reward-model-0 hangs: no sign of life for 60 s; the run waits for its scores"):
        watch(actors)


def test_a_reward_model_that_dies_ends_the_run_with_its_cause():
    actors, died = FakeActorGroup(done_after=100), PeerLostError("reward-model-0 died: out of memory")
    actors.reward_models = [FakeMember("reward-model-0", ends=lambda: True, error=died)]  # the trainer goes on
    with pytest.raises(RunError, match="reward-model-0 died: out of memory; without it no response can be scored"):
        watch(actors)
