"""Kill a coordinator at any call, while producers, trainers and the driver live on, and let another one take over.

Real: coordinator, scheduler, ledger and all files. Simulated: two producers whose samples follow from prompt and
weights, two trainer ranks that ask for work each at its own pace, and the driver. A kill comes before a call, or after
it: then the caller has no answer, and calls the next coordinator again.
"""

import dataclasses
import random
import shutil
from contextlib import suppress

import numpy as np

from coati_rl.checkpoint.ledger_files import segments_in
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.coordinator.take_over import read_left_state
from coati_rl.types import CommitResult
from coati_rl.work import (
    CommitReport,
    FinishWork,
    ProbeReport,
    RepeatWork,
    SaveWork,
    SyncReport,
    SyncWork,
    TrainWork,
    Wait,
)

PROBE = np.array([-0.5, -0.25], dtype=np.float32)


class Killed(Exception):
    """The coordinator is dead; another one is there."""


class ReplacedCoordinators:
    """A run of `num_prompts` prompts; `go` drives it to its end through `kills`."""

    def __init__(
        self, make_coordinator, make_group, directory, *, seed, kills, fails=(), loses=False, often=0.08, **sizes
    ):
        self.rng = random.Random(seed)
        self._make, self._make_group, self._sizes = make_coordinator, make_group, sizes
        self._dir, self._num_lives = directory, 0
        self._kills_left, self._fails, self._loses, self._often = kills, fails, loses, often
        self.num_kills = self.num_voided = self._num_since_step = 0
        self.events, self.batches, self.offered = [], {}, {}
        self._held = {}  # producer -> lease id -> (lease, version it is sampled with)
        self._versions = {}
        self._new_producers = 0
        self._asked = [0, 0]
        self._items = [[], []]
        self._todo = []  # reports of rank 0 and of commits, the oldest first
        self._absent, self._reported = set(), set()
        self._coordinator = self._begin(None)

    @property
    def files(self):
        """The directory of the coordinator that lives."""
        return self._dir / f"life-{self._num_lives}"

    def go(self):
        for _ in range(2):
            self._join()
        for _ in range(20_000):
            if self._is_done():
                break
            with suppress(Killed):
                self._act()
        assert self._is_done(), (self._coordinator.status().text, self._todo, [len(items) for items in self._items])
        self._coordinator.flush(timeout_s=10)
        self._take_events(kills=False)

    def _is_done(self):
        return all(items and isinstance(items[-1], FinishWork) for items in self._items) and not self._todo

    def _begin(self, left):
        self._writer = LedgerWriter(self.files / "ledger", batch_s=self.rng.choice((0.0, 0.002, 60.0)))
        return self._make(**self._sizes, directory=self.files, ledger=self._writer, left=left)

    def _call(self, method, *args, kills=True, **kwargs):
        """Call the coordinator. Raises: Killed if it dies before or after."""
        dies = kills and self._kills_left and self._num_since_step < 2 and self.rng.random() < self._often
        if dies and self.rng.random() < 0.5:
            self._kill()
        result = getattr(self._coordinator, method)(*args, **kwargs)
        if method == "report_step" and args[0] not in self._reported:
            self._reported.add(args[0])
            self._num_since_step = 0
        if dies:
            self._kill()
        return result

    def _kill(self):
        """End this coordinator; what it has not written is lost, and its last frame may be cut."""
        if self.rng.random() < 0.3:
            self._writer.flush(timeout_s=10)
        before = self.files
        self._num_lives += 1
        for name in ("ledger", "rollouts", "eval"):
            _copy(before / name, self.files / name)
        if (segments := segments_in(self.files / "ledger")) and self.rng.random() < 0.3:
            with segments[-1].path.open("ab") as file:
                file.write(self.rng.randbytes(self.rng.randrange(1, 200)))
        self.num_kills, self._num_since_step = self.num_kills + 1, self._num_since_step + 1
        self._kills_left -= 1
        self._coordinator = self._begin(read_left_state(self.files / "ledger"))
        self._absent = set(self._held)
        raise Killed

    def _act(self):
        kind = self.rng.choice(("lease", "answer", "answer", "work", "work", "work", "report", "report", "driver"))
        if kind == "driver":
            if self._loses and self.rng.random() < 0.1:
                self._lose()
            self._take_events()
        elif kind == "work":
            self._work(self.rng.randrange(2))
        elif kind == "report" and self._todo:
            method, args = self._todo[0]
            self._call(method, *args)
            del self._todo[0]
        elif kind in ("lease", "answer") and self._held:
            self._produce(kind, self.rng.choice(sorted(self._held)))

    def _take_events(self, *, kills=True):
        self.events += self._call("events", len(self.events), timeout_s=0, kills=kills)

    def _join(self):
        producer, self._new_producers = self._new_producers, self._new_producers + 1
        self._until_done("add_producer", producer)
        self._held[producer], self._versions[producer] = {}, -1

    def _lose(self):
        producer = self.rng.choice(sorted(self._held))
        del self._held[producer]
        self._absent.discard(producer)
        self._until_done("remove_producer", producer, "killed")
        self._join()

    def _until_done(self, method, *args):
        """As a driver, which does nothing else meanwhile."""
        while True:
            try:
                return self._call(method, *args)
            except Killed:
                pass

    def _produce(self, kind, producer):
        held = self._held[producer]
        if producer in self._absent:
            void = self._call("rejoin", producer, sorted(held))
            self._absent.discard(producer)
            for lease_id in void:
                del held[lease_id]
            self.num_voided += len(void)
            return
        if kind == "lease":
            number = self.rng.choice((1, 3, 100))
            reply = self._call("lease", producer, max_prompts=number, timeout_s=0, is_drained=not held)
            for lease in reply.leases:
                held[lease.lease_id] = (lease, max(reply.policy_version, self._versions[producer]))
        elif held:
            lease_id = self.rng.choice(sorted(held))
            self._answer(producer, *held[lease_id])
            del held[lease_id]

    def _answer(self, producer, lease, version):
        uid = lease.prompt.uid
        if uid in self._fails:
            self._call("fail", producer, lease.lease_id, "cannot be rolled out")
            return
        tag = -(1 + hash_of(f"{uid}/{version}")) / 64  # float32 without rounding, also in the files
        group = self._make_group(lease, producer=producer, version=version, logprob=tag)
        self.offered.setdefault(uid, set()).add(tag)
        self._call("put", producer, [group])

    def _work(self, rank):
        items = self._items[rank]
        if items and isinstance(items[-1], FinishWork):
            return
        if rank == 0 and self._todo and self.rng.random() < 0.8:
            return  # it carries out an item before it asks for the one after the next
        item = self._call("next_work", len(items), rank=rank, timeout_s=0)
        if isinstance(item, Wait):
            return
        items.append(item)
        self._note(len(items) - 1, rank, item)
        if rank == 0:
            self._todo += [*self._reports_of(item)]

    def _note(self, index, rank, item):
        """Every rank gets the same items, and its own part of a batch."""
        other = self._items[1 - rank]
        if len(other) > index:
            assert type(other[index]) is type(item)
            if not isinstance(item, TrainWork | SaveWork):
                assert other[index] == item
        if isinstance(item, TrainWork):
            key = (item.batch.step, rank, index)
            assert key not in self.batches
            self.batches[key] = content(item)

    def _reports_of(self, item):
        if isinstance(item, TrainWork) and item.batch.is_last:
            yield "report_step", (item.batch.step, {"loss": item.batch.step / 8})
        if isinstance(item, RepeatWork):
            yield "report_step", (item.step, {"loss": item.step / 8})
        if isinstance(item, SaveWork):
            yield "report_saved", (item.step, f"step-{item.step}")
        if isinstance(item, SyncWork):
            if item.probe:
                yield "report_probe", (ProbeReport(policy_version=item.policy_version, logprobs=PROBE),)
            here = tuple(p for p in item.members if p in self._held)
            report = {"index": item.index, "seconds": 0.0, "digest": "d", "identity": "i"}
            failed = {p: "is gone" for p in item.members if p not in here}
            yield "report_sync", (SyncReport(staged=() if failed else here, failed=failed, **report),)
            for producer in () if failed else here:
                self._versions[producer] = item.policy_version
                result = CommitResult(seconds=0.0, probe_logprobs=PROBE if item.probe else PROBE[:0], identities=("i",))
                commit = CommitReport(producer=producer, policy_version=item.policy_version, result=result)
                yield "report_commit", (commit,)


def content(value):
    """Values of all fields, to be compared."""
    if dataclasses.is_dataclass(value):
        return [content(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return {key: content(each) for key, each in value.items()}
    return (value.dtype.str, value.tolist()) if isinstance(value, np.ndarray) else value


def hash_of(text):
    """A small number that only the text decides."""
    return sum(text.encode()) % 997


def _copy(source, target):
    """Copy the files of one moment: their writer goes on, and may take one away meanwhile."""
    while source.is_dir():
        try:
            shutil.copytree(source, target)
            return
        except (shutil.Error, FileNotFoundError):
            shutil.rmtree(target, ignore_errors=True)
