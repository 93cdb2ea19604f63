"""Drive one producer and one trainer of a coordinator, and read their files."""

import json

from coati_rl.checkpoint.position import read_data_state
from coati_rl.checkpoint.untrained_rollouts import UntrainedRollouts
from coati_rl.reading.prompt_source import drawn_prompt
from coati_rl.work import CommitReport, RepeatWork, SyncReport, SyncWork, TrainWork
from tests.unit.coordinator.coordinator_calls import events, work


class Run:
    """`reply` says of a prompt's uid how its group differs from the factory's; by default it does not."""

    def __init__(self, coordinator, make_group, reply=lambda uid: {}):
        self.coordinator = coordinator
        self.make_group = make_group
        self.reply = reply
        self.version = 0
        self.open = []  # leases that are not answered yet
        self.items = []
        coordinator.add_producer(0, version=0)

    def lease(self, number=100):
        self.open += self.coordinator.lease(0, max_prompts=number, timeout_s=0).leases

    def answer(self, number=100, **changes):
        for lease in self.open[:number]:
            group = self.make_group(lease, version=self.version, **(self.reply(lease.prompt.uid) | changes))
            self.coordinator.put(0, [group])
        del self.open[:number]

    def next_work(self):
        item = work(self.coordinator, len(self.items))
        if item is None:
            return None
        self.items.append(item)
        if isinstance(item, TrainWork) and item.batch.is_last:
            self.coordinator.report_step(item.batch.step, {})
        if isinstance(item, RepeatWork):
            self.coordinator.report_step(item.step, {})
        if isinstance(item, SyncWork):
            self.version = item.policy_version
            report = SyncReport(index=item.index, staged=(0,), failed={}, seconds=0.0, digest="d")
            self.coordinator.report_sync(report)
            self.coordinator.report_commit(CommitReport(producer=0, policy_version=item.policy_version))
        return item

    def until(self, kind, *, step=None):
        """Drive on until an item of this kind (for this step) is handed out; it is returned."""
        for _ in range(1000):
            self.lease()
            self.answer(1)
            item = self.next_work()
            if isinstance(item, kind) and (step is None or item.step == step):
                return item
        raise AssertionError(f"no {kind} after {self.items}")

    def events(self, kind):
        return events(self.coordinator, kind)


def position_of(save):
    """As it comes back from state.json."""
    return read_data_state(json.loads(json.dumps(save.data_state)))[0]


def resumed(save, prompts):
    """Return the start of a coordinator resumed from this checkpoint, as read from its files."""
    by_uid = {prompt.uid: prompt for prompt in prompts}
    untrained = UntrainedRollouts.from_bytes(save.rollouts, lambda uid: drawn_prompt(by_uid, uid))
    return {"start": position_of(save), "untrained": untrained}


def rollouts(tmp_path):
    """The lines of all rollout files, of coordinators that were asked for work since."""
    files = sorted((tmp_path / "rollouts").iterdir())
    return [json.loads(line) for file in files for line in file.read_text().split("\n")[:-1]]


def trained(tmp_path):
    """(step, uid) of every group with a sample that was handed to the trainers."""
    return sorted({(line["step"], line["uid"]) for line in rollouts(tmp_path) if line["is_trained"]})
