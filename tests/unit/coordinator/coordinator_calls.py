"""Make the calls of producers and trainers to a coordinator, in a line each."""

import numpy as np

from coati_rl.types import CommitResult
from coati_rl.work import CommitReport, FinishWork, SyncReport, SyncWork, TrainWork, Wait

PROBE = (1, 2, 3)  # the first prompt


def lease_all(coordinator, producer=0):
    return coordinator.lease(producer, max_prompts=100, timeout_s=0).leases


def work(coordinator, index, rank=0):
    """The item, None while it has to be waited for; not for the disk."""
    coordinator.flush(timeout_s=10)
    item = coordinator.next_work(index, rank=rank, timeout_s=0)
    return None if isinstance(item, Wait) else item


def report_step(coordinator, step):
    coordinator.report_step(step, {"loss": 0.0})


def report_staged(coordinator, item, *, staged=None, failed=None, identity=""):
    staged = item.members if staged is None else staged
    report = SyncReport(
        index=item.index, staged=staged, failed=failed or {}, seconds=0.1, digest="d", identity=identity
    )
    coordinator.report_sync(report)
    return staged


def report_commit(coordinator, producer, version, *, error=None, probe=(), identities=()):
    logprobs = np.array(probe, dtype=np.float32)
    result = CommitResult(seconds=0.01, probe_logprobs=logprobs, identities=identities)
    coordinator.report_commit(
        CommitReport(producer=producer, policy_version=version, error=error, result=None if error else result)
    )


def report_sync(coordinator, item, **changes):
    for producer in report_staged(coordinator, item, **changes):
        report_commit(coordinator, producer, item.policy_version)


def finish_leases(coordinator, make_group, leases, *, producer=0, version=0):
    return coordinator.put(producer, [make_group(lease, producer=producer, version=version) for lease in leases])


def drive(coordinator, make_group, *, begun=0):
    """Be one producer and one trainer until the run is over; returns the items of work, but for those that are done."""
    items, version = [None] * begun, 0
    for _ in range(1000):
        finish_leases(coordinator, make_group, lease_all(coordinator), version=version)
        item = work(coordinator, len(items))
        if item is None:
            continue
        items.append(item)
        if isinstance(item, TrainWork) and item.batch.is_last:
            report_step(coordinator, item.batch.step)
        if isinstance(item, SyncWork):
            report_sync(coordinator, item)
            version = item.policy_version
        if isinstance(item, FinishWork):
            return items[begun:]
    raise AssertionError(f"no end after {items}")


def events(coordinator, kind):
    coordinator.flush(timeout_s=10)
    return [event for event in coordinator.events(0, timeout_s=0) if event["event"] == kind]


def events_of_end(coordinator):
    """Take the events there are; those of the end of the run. `coordinator.seen` keeps all."""
    coordinator.flush(timeout_s=10)
    seen = vars(coordinator).setdefault("seen", [])
    seen += coordinator.events(len(seen), timeout_s=0)
    return [event for event in seen if event["event"] == "finished"]
