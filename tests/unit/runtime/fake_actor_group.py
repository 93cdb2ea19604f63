"""Stand in for `ActorGroup` without Ray: what its actors do is given beforehand."""

from coati_rl.coordinator.run_status import RunStatus
from coati_rl.runtime.actor_group import ManagedActor


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
    """One trainer; events as they are after each look."""

    def __init__(self, *looks):
        self.looks, self.happened = list(looks), []
        self.coordinator = self
        self.trainers = {0: ManagedActor(name="trainer-0", handle=None, task="task")}
        self.starting, self.producers, self.reward_models = {}, {}, []
        self.is_done, self.heartbeats, self.raylets_lost = False, FakeHeartbeats(), []

    def members(self):
        return [*self.trainers.values(), *self.starting.values(), *self.producers.values(), *self.reward_models]

    def dead_raylets(self):
        return self.raylets_lost

    def events(self, after, *, timeout_s):
        self.happened += self.looks.pop(0) if self.looks else []
        return self.happened[after:]

    def status(self):
        return RunStatus(idle_s=0.0, text="waiting for rollouts")

    def flush(self, *, timeout_s):
        """All is written."""
