"""Track the weight sync in progress: its transfer, the producers' commits, and the check of their log-probabilities.

A sync is staged on all producers before any commits; trainers continue as soon as it is staged, while producers finish
their current responses. There is one sync at a time; its record is written once all its producers serve the weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from coati_rl.coordinator.logprob_mismatch import LogprobMismatch, LogprobMismatchMonitor
from coati_rl.coordinator.membership import Membership
from coati_rl.coordinator.settings import CoordinatorSettings
from coati_rl.errors import RunError
from coati_rl.routes import routes_of
from coati_rl.text import name_producers
from coati_rl.types import CommitResult
from coati_rl.work import CommitReport, ProbeWork, SyncReport, SyncWork, Wait


class WeightSyncs:
    """Track the sync in progress; called under the coordinator's lock."""

    KEPT: ClassVar = (
        "identities",
        "_transfer",
        "_report",
        "_last_index",
        "_version",
        "_commits",
        "_gaps",
        "_num_staged",
        "_probed",
        "_is_probed",
        "_unscored",
        "_scoring",
        "seconds",
    )

    def __init__(
        self,
        settings: CoordinatorSettings,
        members: Membership,
        monitor: LogprobMismatchMonitor,
        *,
        probe: Sequence[int],
        identities: Mapping[int, str] | None = None,
    ) -> None:
        """Begin without a sync.

        Args:
            settings: of the coordinator.
            members: the producers.
            monitor: judges probes.
            probe: token ids whose log-probabilities verify a sync.
            identities: of weights that sampled rollouts of the checkpoint, by policy version.
        """
        self.identities = dict(identities or {})  # of weights that were staged and that rollouts may have, by version
        self._members = members
        self._monitor = monitor
        self._probe = tuple(probe)
        self._replays_routes = settings.replays_routes
        self._probe_interval = settings.sync.probe_interval
        self._transfer: SyncWork | None = None  # started, not yet reported
        self._report: SyncReport | None = None  # of the sync whose commits are awaited
        self._last_index: int | None = None  # of the last transfer that was reported
        self._version = 0  # of that sync
        self._commits: dict[int, CommitReport] = {}
        self._gaps: list[LogprobMismatch] = []
        self._num_staged = 0  # successful transfers
        self._probed: set[int] = set()  # producers that were probed once
        self._is_probed = False  # the last sync
        # With `replays_routes`: producers whose answer the trainers have still to score, and the one they are scoring.
        self._unscored: list[int] = []
        self._scoring: int | None = None
        self.seconds = 0.0  # of the last transfer

    @property
    def transfer(self) -> Wait | None:
        """Return the reason for which others wait during a transfer, or the scoring of a probe, until its report."""
        if self._scoring is not None:
            return Wait(reason=f"waiting for the probe of version {self._version} to be scored")
        if self._transfer is None:
            return None
        who = name_producers(self._transfer.members)
        return Wait(reason=f"waiting for the transfer of version {self._transfer.policy_version} to {who}")

    def order(self, index: int, version: int, members: tuple[int, ...]) -> SyncWork:
        """Return the work that sends policy version `version` to these producers."""
        is_probed = self._num_staged % self._probe_interval == 0 or not self._probed.issuperset(members)
        probe = self._probe if is_probed else ()
        self._is_probed = bool(probe)
        self._transfer = SyncWork(index=index, policy_version=version, members=members, probe=probe)
        return self._transfer

    def transferred(self, report: SyncReport) -> int | None:
        """Record the end of the transfer.

        Returns: its version; None if it is reported again, as a trainer does that has lost the answer.
        Raises: RunError if another one was in progress.
        """
        if report.index == self._last_index:
            return None
        if self._transfer is None or report.index != self._transfer.index:
            raise RunError(f"report of sync {report.index}, but {self._transfer} is in progress")
        version, self._transfer, self.seconds = self._transfer.policy_version, None, report.seconds
        self._last_index = report.index
        self._num_staged += bool(report.staged)
        self._members.staged(report.staged, version)
        if report.staged and report.identity:
            self.identities[version] = report.identity
            for old in [each for each in self.identities if each < version and each not in self._members.sync_index_of]:
                del self.identities[old]
        self._report, self._version, self._commits, self._gaps = report, version, {}, []
        return version

    def committed(self, report: CommitReport) -> str | None:
        """Record that a producer serves the weights.

        Returns: why its probe does not match, None if it does.
        Raises: RunError if it serves other weights than the trainers have sent.
        """
        if report.policy_version != self._version or report.producer not in self._members.ids:
            return None  # of a producer that was removed meanwhile
        self._members.committed(report.producer)
        self._commits[report.producer] = report
        if report.result is None:
            return None
        sent = self._report.identity if self._report is not None else ""
        if sent and set(report.result.identities) != {sent}:
            raise RunError(
                f"producer-{report.producer} serves weights with identities {sorted(set(report.result.identities))} as "
                f"version {report.policy_version}, the trainers have {sent}: the engine has not taken what it received"
            )
        self._probed.add(report.producer)
        if self._replays_routes and len(report.result.probe_logprobs):
            self._unscored.append(report.producer)
            return None
        return self._problem(report.producer, report.result)

    @property
    def awaits_routes(self) -> bool:
        """Return True if trainers score the probe of the last sync with the routes of the producers' answers."""
        return self._replays_routes and self._is_probed

    @property
    def has_unscored(self) -> bool:
        """Return True if trainers have to score a probe before their weights change."""
        return bool(self._unscored)

    def next_probe(self) -> ProbeWork | None:
        """Return the work that scores a producer's probe with its routes; None if none waits for it."""
        if not self._unscored:
            return None
        self._scoring = producer = self._unscored.pop(0)
        result = self._commits[producer].result
        routes = None if result is None else routes_of(len(self._probe), [result.probe_routes])
        return ProbeWork(policy_version=self._version, producer=producer, probe=self._probe, routes=routes)

    def scored(self, producer: int) -> str | None:
        """Record that the trainers have scored a producer's probe; return why it does not match, None if it does."""
        if producer != self._scoring or (result := self._commits[producer].result) is None:
            return None  # reported again
        self._scoring = None
        return self._problem(producer, result)

    def _problem(self, producer: int, result: CommitResult) -> str | None:
        """Measure the gap of a probe. Returns: why it does not match, None if it does."""
        logprobs = result.probe_logprobs
        gap = self._monitor.measure(self._version, logprobs)
        if gap is None:
            return None
        self._gaps.append(gap)
        problem = self._monitor.probe_problem(self._version, logprobs, gap)
        return problem and f"producer-{producer}: {problem}"

    def take_record(self) -> Mapping[str, Any] | None:
        """Return the record of the sync for syncs.jsonl, once, when no commit and no probe is awaited any more."""
        if self._report is None or self._members.is_committing or self._unscored or self._scoring is not None:
            return None
        report, self._report = self._report, None
        results = {p: c.result for p, c in self._commits.items() if c.result is not None}
        return {
            "policy_version": self._version,
            "producers": sorted(results),
            "seconds": report.seconds,
            "digest": report.digest,
            "identity": report.identity,
            "bytes": report.num_bytes,
            "problem": report.problem,
            "commit_s": max((result.seconds for result in results.values()), default=None),
            "probe_gap_mean": max((gap.mean for gap in self._gaps), default=None),
            "probe_gap_max": max((gap.max for gap in self._gaps), default=None),
        }
