"""Stand in for `ActorGroup` without Ray: what its actors do is given beforehand."""

from collections.abc import Callable
from dataclasses import dataclass

from coati_rl.coordinator.run_status import RunStatus


@dataclass(frozen=True)
class FakeMember:
    """Its call ends when `ends` says so, and then returns 2 or raises `error`."""

    name: str
    ends: Callable[[], bool] = lambda: False
    error: Exception | None = None
    is_joined: bool = False

    @property
    def handle(self):
        return self.name

    def is_done(self):
        return self.ends()

    def result(self):
        if self.error is not None:
            raise self.error
        return 2


class FakeHeartbeats:
    """Hangs: producer name -> cause, and that of a trainer."""

    def __init__(self):
        self.hung, self.trainer, self.names = {}, None, []

    def poll(self, handles):
        self.names = list(handles)

    def producer_problem(self, name):
        return self.hung.get(name)

    def trainers_problem(self, names):
        return self.trainer

    def describe_phases(self):
        return "trainer-0: wait for work"


class FakeActorGroup:
    """One trainer, which ends with the look `done_after` at whether it has; events as they are after each look."""

    def __init__(self, *looks, done_after=2, error=None):
        self.looks, self.happened = list(looks), []
        self.coordinator = self
        self.trainers = {0: FakeMember("trainer-0", ends=self.trainer_ends, error=error)}
        self.num_looks, self.done_after = 0, done_after
        self.starting, self.producers, self.reward_models, self.scorers = {}, {}, [], []
        self.heartbeats, self.raylets_lost = FakeHeartbeats(), []

    def trainer_ends(self):
        self.num_looks += 1
        return self.num_looks >= self.done_after

    def members(self):
        return [
            *self.trainers.values(),
            *self.starting.values(),
            *self.producers.values(),
            *self.reward_models,
            *self.scorers,
        ]

    def dead_raylets(self):
        return self.raylets_lost

    def events(self, after, *, timeout_s):
        self.happened += self.looks.pop(0) if self.looks else []
        return self.happened[after:]

    def status(self):
        return RunStatus(idle_s=0.0, text="waiting for rollouts")

    def flush(self, *, timeout_s):
        """All is written."""
