"""Follow the weight syncs of a run: which one is under way, how far each producer is with it, and what proves it.

In: the trainers' reports of transfers, the producers' of commits. Out: the SyncWork that is due, and the record of each
sync once all its producers serve the weights. A sync is transferred to all (staged) before anyone commits; trainers go
on as soon as it is staged, while producers finish what they are generating. One sync at a time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from coati_rl.coordinator.logprob_mismatch import LogprobMismatch, LogprobMismatchMonitor
from coati_rl.coordinator.membership import Membership
from coati_rl.coordinator.settings import CoordinatorSettings
from coati_rl.errors import RunError
from coati_rl.text import name_producers
from coati_rl.work import CommitReport, SyncReport, SyncWork, Wait


class WeightSyncs:
    """Keep the sync that is under way; under the coordinator's lock."""

    def __init__(
        self, settings: CoordinatorSettings, members: Membership, gate: LogprobMismatchMonitor, *, probe: Sequence[int]
    ) -> None:
        """`probe`: token ids whose log-probabilities prove a sync."""
        self._members = members
        self._gate = gate
        self._probe = tuple(probe)
        self._probe_interval = settings.probe_interval
        self._transfer: SyncWork | None = None  # handed out, not yet reported
        self._report: SyncReport | None = None  # of the sync whose commits are awaited
        self._version = 0  # of that sync
        self._commits: dict[int, CommitReport] = {}
        self._gaps: list[LogprobMismatch] = []
        self._num_staged = 0  # transfers that went well
        self._probed: set[int] = set()  # producers that were probed once
        self.seconds = 0.0  # of the last transfer

    @property
    def transfer(self) -> Wait | None:
        """Return what a transfer that is under way makes others wait for, from its order until its report."""
        if self._transfer is None:
            return None
        who = name_producers(self._transfer.members)
        return Wait(reason=f"waiting for the transfer of version {self._transfer.policy_version} to {who}")

    def order(self, index: int, version: int, members: tuple[int, ...]) -> SyncWork:
        """Send `version` to these producers."""
        is_probed = self._num_staged % self._probe_interval == 0 or not self._probed.issuperset(members)
        probe = self._probe if is_probed else ()
        self._transfer = SyncWork(index=index, policy_version=version, members=members, probe=probe)
        return self._transfer

    def transferred(self, report: SyncReport) -> int:
        """Note that the transfer is over. Returns: its version. Raises: RunError if another one was under way."""
        if self._transfer is None or report.index != self._transfer.index:
            raise RunError(f"report of sync {report.index}, but {self._transfer} is under way")
        version, self._transfer, self.seconds = self._transfer.policy_version, None, report.seconds
        self._num_staged += bool(report.staged)
        self._members.staged(report.staged, version)
        self._report, self._version, self._commits, self._gaps = report, version, {}, []
        return version

    def committed(self, report: CommitReport) -> str | None:
        """Note that a producer serves the weights. Returns: what is wrong with its answer to the probe, if anything."""
        if report.policy_version != self._version or report.producer not in self._members.ids:
            return None  # of a producer that was given up meanwhile
        self._members.committed(report.producer)
        self._commits[report.producer] = report
        if report.result is None:
            return None
        self._probed.add(report.producer)
        logprobs = report.result.probe_logprobs
        gap = self._gate.measure(report.policy_version, logprobs)
        if gap is None:
            return None
        self._gaps.append(gap)
        problem = self._gate.probe_problem(report.policy_version, logprobs, gap)
        return problem and f"producer-{report.producer}: {problem}"

    def take_record(self) -> Mapping[str, Any] | None:
        """Return what syncs.jsonl says of the sync, once: when no commit is awaited any more."""
        if self._report is None or self._members.is_committing:
            return None
        report, self._report = self._report, None
        results = {p: c.result for p, c in self._commits.items() if c.result is not None}
        return {
            "policy_version": self._version,
            "producers": sorted(results),
            "seconds": report.seconds,
            "digest": report.digest,
            "problem": report.problem,
            "commit_s": max((result.seconds for result in results.values()), default=None),
            "probe_gap_mean": max((gap.mean for gap in self._gaps), default=None),
            "probe_gap_max": max((gap.max for gap in self._gaps), default=None),
        }
