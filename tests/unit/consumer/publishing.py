"""Run a weight publisher, other stages' senders and two producers over gloo between threads, with faults."""

import itertools
import json
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
import xxhash

from coati_rl.transport.manifest import TensorEntry, WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.wire import WeightSender
from coati_rl.types import CommitResult
from coati_rl.work import CommitReport, ProbeReport, SyncReport, SyncWork
from consumer.weight_sync.publisher import StageSender, WeightPublisher
from producer.engines.staging import StagingArea

Named = Sequence[tuple[str, torch.Tensor]]

STAGES: tuple[Named, ...] = (
    [("embed", torch.arange(12.0).view(3, 4)), ("layer0", torch.full((5,), 0.5))],
    [("layer1", torch.full((5,), 1.5)), ("layer2", torch.full((5,), 2.5))],
    [("head", torch.arange(7.0))],
)


def make_manifest(stages: Sequence[Named]) -> Callable[[int], WeightManifest]:
    """Return a factory of manifests of the stages in order; rank s sends stage s."""
    entries = [
        TensorEntry(name=name, dtype="float32", shape=tuple(tensor.shape), sender=stage)
        for stage, tensors in enumerate(stages)
        for name, tensor in tensors
    ]
    return lambda version: WeightManifest(policy_version=version, entries=tuple(entries), bucket_bytes=32)


def digest_of(stages: Sequence[Named]) -> str:
    return xxhash.xxh3_128(b"".join(tensor.numpy().tobytes() for share in stages for _, tensor in share)).hexdigest()


class Export:
    """The weights of a stage; knows whether it has been iterated to the end."""

    def __init__(self, share: Named, *, fails_with: Exception | None = None) -> None:
        self._share = share
        self._error = fails_with  # raised after the first tensor
        self.num_yielded = 0
        self.is_at_end = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for named in self._share:
            self.num_yielded += 1
            yield named
            if self._error is not None:
                raise self._error
        self.is_at_end = True


class Producer:
    """Stages as an engine does; `faults` are raised by the next calls of stage_weights, before anything is received."""

    def __init__(self) -> None:
        self.faults: list[Exception] = []
        self.commit_faults: list[Exception] = []
        self.serves: dict[str, torch.Tensor] = {}
        self.version = 0
        self._area = StagingArea(device=torch.device("cpu"))

    def stage_weights(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> tuple[str, ...]:
        if self.faults:
            raise self.faults.pop(0)
        self._area.start(manifest, rendezvous, timeout_s=timeout_s)
        while (staged := self._area.poll()) is None:
            time.sleep(0.005)
        return (staged.digest,)

    def commit_weights(self, policy_version: int, probe: Sequence[int], *, timeout_s: float) -> CommitResult:
        if self.commit_faults:
            raise self.commit_faults.pop(0)
        staged = self._area.take()
        self.serves, self.version = dict(staged.tensors), policy_version
        logprobs = np.array(probe[1:], dtype=np.float32)
        return CommitResult(seconds=0.0, probe_logprobs=logprobs, identities=(staged.digest,))

    def close(self) -> None:
        self._area.close()


class Reports:
    """The coordinator's ear."""

    def __init__(self) -> None:
        self.syncs: list[SyncReport] = []
        self.commits: queue.SimpleQueue[CommitReport] = queue.SimpleQueue()

    def report_probe(self, report: ProbeReport) -> None:
        raise AssertionError("the publisher has nothing to do with the trainers' probe")

    def report_sync(self, report: SyncReport) -> None:
        self.syncs.append(report)

    def report_commit(self, report: CommitReport) -> None:
        self.commits.put(report)


class Run:
    """The heads of `num_stages` stages, rank 0 in the test's thread and the others in their own, and two producers."""

    def __init__(self, num_stages: int) -> None:
        self.stages: list[Named] = [*STAGES[: num_stages - 1], [*itertools.chain(*STAGES[num_stages - 1 :])]]
        self.producers = {number: Producer() for number in range(2)}
        self.reports = Reports()
        self.announced: list[dict[str, object]] = []
        self.publisher = self.make_publisher()
        self._queues = [queue.SimpleQueue[str]() for _ in range(1, num_stages)]
        self._heads = [
            StageSender(WeightSender(), inbox.get, rank=rank) for rank, inbox in enumerate(self._queues, start=1)
        ]
        self._pool = ThreadPoolExecutor(num_stages)

    def make_publisher(self, **settings: object) -> WeightPublisher:
        self._sender = WeightSender()
        defaults = {
            "connect": self.producers.__getitem__,
            "make_manifest": make_manifest(self.stages),
            "reports": self.reports,
        }
        return WeightPublisher(
            self._sender,
            **(defaults | settings),
            ranks_per_producer=1,
            timeout_s=20.0,
            commit_timeout_s=20.0,
            num_senders=len(self.stages),
            announce=self._announce,
        )

    def _announce(self, text: str) -> None:
        self.announced.append(json.loads(text))
        for inbox in self._queues:
            inbox.put(text)

    def exports(self) -> list[Export]:
        return [Export(share) for share in self.stages]

    def start_others(self, exports: Sequence[Export]) -> list["Future[None]"]:
        return [
            self._pool.submit(head.send, iter(export)) for head, export in zip(self._heads, exports[1:], strict=True)
        ]

    def sync(self, version: int, *, members: tuple[int, ...] = (0, 1), exports: Sequence[Export] = ()) -> SyncReport:
        """One sync with its commits, from which no head raises and which iterates every export to its end."""
        exports = exports or self.exports()
        others = self.start_others(exports)
        report = self.publish(version, exports[0], members=members)
        for future in others:
            future.result(20.0)
        assert all(export.is_at_end for export in exports)
        return report

    def publish(self, version: int, export: Export, *, members: tuple[int, ...] = (0, 1)) -> SyncReport:
        """Rank 0's part; what it reported is returned, and `commits` has the producers' ends."""
        work = SyncWork(index=version, policy_version=version, members=members, probe=(5, 6, 7))
        self.publisher.publish(work, iter(export))
        report = self.reports.syncs[-1]
        commits = [self.reports.commits.get(timeout=60.0) for _ in report.staged]
        self.commits = {commit.producer: commit for commit in commits}
        return report

    def close(self) -> None:
        self._sender.close()
        for end in (*self._heads, *self.producers.values()):
            end.close()
