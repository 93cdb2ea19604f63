"""Kill a coordinator at any call, with what its ledger's files hold at that moment, and go on from the last checkpoint.

Real: coordinator, scheduler, ledger and its files, checkpoints' positions and rollouts, what a resumption moves aside.
Simulated: a producer whose samples are unlike any other's, a trainer, and the directory of checkpoints.
"""

import random
import shutil
from dataclasses import dataclass, field

from coati_rl.checkpoint.ledger_files import segments_in
from coati_rl.checkpoint.ledger_resume import recover
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.checkpoint.rollback import set_aside_records
from coati_rl.coordinator.take_over import unread_events
from coati_rl.reading.prompt_source import DatasetPrompts
from coati_rl.work import CommitReport, FinishWork, SaveWork, SyncReport, SyncWork, TrainWork, Wait
from tests.unit.coordinator.driver import position_of, resumed


@dataclass
class Answered:
    """What was delivered since a checkpoint was ordered: (uid, version, tag of its samples, record of the ledger)."""

    save: SaveWork | None
    groups: list[tuple[str, int, float, int]] = field(default_factory=list)


class KilledRun:
    """A run over `num_prompts`; `go` drives it to its end through kills. `fails` says which prompts cannot be."""

    def __init__(
        self, make_coordinator, make_group, make_prompts, tmp_path, *, seed, num_prompts, fails=(), loses=False, **sizes
    ):
        self.rng = random.Random(seed)
        self._make_coordinator, self._make_group, self._prompts = (
            make_coordinator,
            make_group,
            make_prompts(num_prompts),
        )
        self._sizes = {"num_prompts": num_prompts, **sizes}
        self._fails, self._loses, self._dir = fails, loses, tmp_path
        self._num_lives = self._num_sampled = 0
        self._complete: SaveWork | None = None  # the newest complete checkpoint
        self._answered = [Answered(save=None)]
        self.num_kills = self.num_taken_up = 0
        self.sampled_again = []  # uids that the ledger had, and that were leased again
        self.tags = {}  # uid -> the samples that were delivered last, or taken up
        self.records = []  # of steps, as a driver writes them; a resumed run replaces those after its checkpoint

    def go(self, *, kills):
        """Drive the run to its end; every call may be the last of a life, `kills` times."""
        self._begin()
        while True:
            often = 0.01 if self._complete is None else 0.12  # before its first checkpoint a run is begun again
            if self.num_kills < kills and self.rng.random() < often:
                self._kill()
            if isinstance(self._act(), FinishWork):
                self._note_steps()
                return

    def _ledger(self):
        return self._dir / f"ledger-{self._num_lives}"

    def _begin(self):
        save, start, taken_up = self._complete, {}, None
        if save is not None:
            position = position_of(save)
            aside = self._dir / "discarded" / str(self._num_lives)
            set_aside_records(
                save.step,
                aside,
                run_dir=self._dir,
                rollouts=self._dir / "rollouts",
                evaluation=self._dir / "eval",
            )
            source = DatasetPrompts(self._prompts, num_episodes=1, seed=0)
            taken_up = recover(self._ledger(), position, source.find, n_behind=self._sizes.get("n_behind", 0))
            start = {**resumed(save, self._prompts), "recovered": taken_up}
        elif self._num_lives:
            shutil.rmtree(self._dir / "rollouts", ignore_errors=True)  # begun again: there is no checkpoint
        self._taken = {each.group.prompt.uid for each in taken_up.finished} if taken_up else set()
        self.num_taken_up += len(self._taken)
        self._check(taken_up, 0 if save is None else save.step)
        self.records = [each for each in self.records if each["step"] <= (0 if save is None else save.step)]
        if save is not None:
            self._record(unread_events(self._ledger(), save.step))
        self._writer = LedgerWriter(self._ledger(), batch_s=self.rng.choice((0.0, 0.002, 60.0)))
        self._coordinator = self._make_coordinator(**self._sizes, **start, ledger=self._writer)
        self._coordinator.add_producer(0)
        self._producer, self._seen, self._saving = 0, 0, None
        self._version, self._open, self._num_items = -1, [], 0

    def _check(self, taken_up, step):
        """Compare what is taken up with what was delivered since that checkpoint was ordered."""
        if taken_up is None:  # the checkpoint's segment was not written yet, or there is no checkpoint
            self._answered = [Answered(save=self._complete)]
            return
        mine = next(each for each in reversed(self._answered) if each.save is self._complete)
        later = self._answered[self._answered.index(mine) :]
        delivered = [group for each in later for group in each.groups]
        usable = {uid: tag for uid, version, tag, _ in delivered if version <= step}
        durable = {uid for uid, version, _, number in delivered if version <= step and number <= self._durable}
        found = {each.group.prompt.uid: float(each.group.trajectories[0].logprobs[0]) for each in taken_up.finished}
        assert durable <= found.keys() <= usable.keys(), (durable - found.keys(), found.keys() - usable.keys())
        assert all(usable[uid] == tag for uid, tag in found.items())
        self.tags.update(found)
        # What it delivers from now on adds to what it has taken up.
        kept = [(uid, version, tag, 0) for uid, version, tag, _ in delivered if uid in found and version <= step]
        self._answered = [Answered(save=self._complete, groups=kept)]

    def _act(self):
        others = ("lose" if self._loses else "work", "read")
        kind = self.rng.choice(("lease", "answer", "answer", "work", "work", "work", *others))
        if kind == "lease":
            reply = self._coordinator.lease(self._producer, max_prompts=self.rng.choice((1, 3, 100)), timeout_s=0)
            leases = [lease for lease in reply.leases if lease.prompt.purpose == "train"]
            self._open += [(lease, reply.policy_version) for lease in leases]
            self.sampled_again += [lease.prompt.uid for lease in leases if lease.prompt.uid in self._taken]
        elif kind == "answer" and self._open:
            self._answer(*self._open.pop(self.rng.randrange(len(self._open))))
        elif kind == "lose" and self.rng.random() < 0.1:
            self._coordinator.remove_producer(self._producer, "lost")
            self._producer, self._open = self._producer + 1, []
            self._coordinator.add_producer(self._producer)
        elif kind == "read" and self.rng.random() < 0.2:
            self._note_steps()
        elif kind == "work":
            return self._work()
        return None

    def _answer(self, lease, version):
        uid = lease.prompt.uid
        if uid in self._fails:
            self._coordinator.fail(self._producer, lease.lease_id, "cannot be rolled out")
            return
        self._num_sampled += 1
        tag = -self._num_sampled / 1024  # float32 without rounding
        group = self._make_group(lease, producer=self._producer, version=version, logprob=tag)
        assert self._coordinator.put(self._producer, [group]) == 1
        self.tags[uid] = tag
        self._answered[-1].groups.append((uid, version, tag, self._writer.num_appended))

    def _work(self):
        if self._saving is not None:
            self._coordinator.report_saved(self._saving.step, "")
            self._complete, self._saving = self._saving, None
        item = self._coordinator.next_work(self._num_items, rank=0, timeout_s=0)
        if isinstance(item, Wait):
            return None
        self._num_items += 1
        if isinstance(item, TrainWork) and item.batch.is_last:
            self._coordinator.report_step(item.batch.step, {})
        if isinstance(item, SaveWork):
            self._saving = item
            self._answered.append(Answered(save=item))
        if isinstance(item, SyncWork):
            report = SyncReport(index=item.index, staged=item.members, failed={}, seconds=0.0, digest="d", identity="i")
            self._coordinator.report_sync(report)
            for producer in item.members:
                self._coordinator.report_commit(CommitReport(producer=producer, policy_version=item.policy_version))
        return item

    def _kill(self):
        """End this life: the next one has the files of this moment, of which the last frame may be cut."""
        self._coordinator._state.writer.flush(timeout_s=10)  # the rollouts' disk is not under test
        if self.rng.random() < 0.5:
            self._writer.flush(timeout_s=10)
        durable = self._writer.num_durable
        before = self._ledger()
        self._num_lives += 1
        self.num_kills += 1
        _copy(before, self._ledger())
        self._durable = durable
        left = segments_in(self._ledger())
        if left and self.rng.random() < 0.3:  # what comes after the last durable frame is cut anywhere
            path = left[-1].path
            size, torn = path.stat().st_size, self.rng.randbytes(self.rng.randrange(200))
            path.write_bytes(path.read_bytes()[:size] + torn)
        self._begin()

    def _note_steps(self):
        self._coordinator._state.writer.flush(timeout_s=10)
        events = self._coordinator.events(self._seen, timeout_s=0)
        self._seen += len(events)
        self._record(events)

    def _record(self, events):
        written = {each["step"] for each in self.records}
        steps = [each for each in events if each["event"] == "step" and each["step"] not in written]
        self.records += steps


def _copy(source, target):
    """Copy the files of one moment: their writer goes on, and may take one away meanwhile."""
    while source.is_dir():
        try:
            shutil.copytree(source, target)
            return
        except shutil.Error:
            shutil.rmtree(target)
