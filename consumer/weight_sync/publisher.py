"""Policy weights -> producers, in two phases. All stage the update beside the serving weights; if every digest is
the sender's, all commit it, each as soon as it can, while the trainers go on. A producer that is dead or does not
answer is reported as failed; when a transfer breaks for the others too, they keep their old weights and the coordinator
orders the sync again.

With pipeline stages, the head rank of each stage sends that stage's tensors: rank 0 directs the transfer and tells the
other heads what to do, once per sync, in an announcement.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from coati_rl.errors import EngineError, PeerLostError, RunError, TransferError
from coati_rl.protocols import SyncReports, WeightReceiver
from coati_rl.transport.manifest import WeightManifest, parse_object
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.wire import WeightSender
from coati_rl.work import CommitReport, SyncReport, SyncWork

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # of one version, when no producer is to blame

Weights = Iterator[tuple[str, torch.Tensor]]


class WeightPublisher:
    """The sending end on trainer rank 0, the head of the first stage."""

    def __init__(
        self,
        sender: WeightSender,
        connect: Callable[[int], WeightReceiver],
        make_manifest: Callable[[int], WeightManifest],
        reports: SyncReports,
        *,
        ranks_per_producer: int,
        timeout_s: float,
        commit_timeout_s: float,
        num_senders: int = 1,
        announce: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`announce` hands a text to the `StageSender` of every other stage."""
        self._sender = sender
        self._connect = connect
        self._make_manifest = make_manifest  # policy version -> what all senders will send
        self._reports = reports
        self._ranks_per_producer = ranks_per_producer
        self._timeout_s = timeout_s  # of the transfer
        self._commit_timeout_s = commit_timeout_s  # which may wait for what is generating to end
        self._num_senders = num_senders
        self._announce = announce
        self._group: tuple[int, ...] = ()  # producers of the open group
        self._rendezvous: list[Rendezvous] = []  # their invitations
        self._num_fruitless = 0
        self._unreported: Exception | None = None
        self._problem = ""  # of the transfer that failed last: what went wrong first

    def publish(self, work: SyncWork, weights: Weights) -> None:
        """One sync: returns when all producers have staged it. They commit in the background, and are reported then.

        Args:
            weights: of this rank's stage; iterated to the end in any case.
        Raises: RunError when it fails again and again without a producer being gone.
        """
        if self._unreported is not None:
            raise RunError(f"a commit could not be reported: {self._unreported}") from self._unreported
        begin, failed = time.perf_counter(), dict[int, str]()
        with ThreadPoolExecutor(len(work.members)) as pool, _to_the_end(weights):
            digest, staging = self._transfer(pool, work, weights)
            staged = tuple(self._staged(digest, staging, failed))
        if staged or failed:
            self._num_fruitless = 0
        else:
            self._give_up_in_time(work.policy_version)
        seconds = time.perf_counter() - begin
        # First, so that nobody who is about to commit gets a prompt before it has.
        report = SyncReport(index=work.index, staged=staged, failed=failed, seconds=seconds, digest=digest)
        self._reports.report_sync(replace(report, problem=self._problem))
        for producer in staged:
            threading.Thread(target=self._commit, args=(producer, work), name=f"commit-{producer}", daemon=True).start()

    def _transfer(
        self, pool: ThreadPoolExecutor, work: SyncWork, weights: Weights
    ) -> tuple[str, dict[int, "Future[tuple[str, ...]]"]]:
        """Returns: the digest sent, empty if that failed, and the answer of each producer to come."""
        self._problem = ""
        manifest = self._make_manifest(work.policy_version)
        invitations: tuple[Rendezvous, ...] = ()  # none: the group of the last sync goes on
        if work.members != self._group or not self._sender.is_open:
            sizes = [self._ranks_per_producer] * len(work.members)
            self._rendezvous = self._sender.open(sizes, num_senders=self._num_senders)
            self._group, invitations = work.members, self._sender.sender_invitations
        self._announce(_format_announcement(manifest, invitations, self._timeout_s))
        staging = {
            producer: pool.submit(self._stage, producer, manifest, rendezvous)
            for producer, rendezvous in zip(work.members, self._rendezvous, strict=True)
        }
        for producer, future in staging.items():
            future.add_done_callback(partial(self._cancel_on_error, producer))
        try:
            return self._sender.send(manifest, weights, timeout_s=self._timeout_s), staging
        except TransferError as error:
            self._problem = self._problem or str(error)
            logger.warning("weight transfer to version %d failed: %s", work.policy_version, error)
            return "", staging

    def _staged(self, digest: str, staging: dict[int, "Future[tuple[str, ...]]"], failed: dict[int, str]) -> list[int]:
        """The producers that hold the update, once all have answered: all of them or none."""
        staged = [p for p, future in staging.items() if self._succeeded(p, future, failed)]
        if len(staged) < len(staging) or not digest:
            self._sender.close()
            return []
        for producer in staged:
            digests = set(staging[producer].result())
            if digests != {digest}:
                raise RunError(f"producer {producer} received {sorted(digests)}, sent was {digest}: a corrupt transfer")
        return staged

    def _stage(self, producer: int, manifest: WeightManifest, rendezvous: Rendezvous) -> tuple[str, ...]:
        return self._connect(producer).stage_weights(manifest, rendezvous, timeout_s=self._timeout_s)

    def _commit(self, producer: int, work: SyncWork) -> None:
        """On a thread of its own."""
        report = CommitReport(producer=producer, policy_version=work.policy_version)
        try:
            connection = self._connect(producer)
            result = connection.commit_weights(work.policy_version, work.probe, timeout_s=self._commit_timeout_s)
            report = replace(report, result=result)
        except Exception as error:  # noqa: BLE001  (a thread's end; the producer is replaced, whatever it was)
            cause = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
            report = replace(report, error=cause)
        try:
            self._reports.report_commit(report)
        except Exception as error:  # noqa: BLE001  (raised in the next sync: the coordinator waits for this report)
            self._unreported = error

    def _cancel_on_error(self, producer: int, future: "Future[Any]") -> None:
        error = future.exception()
        if error is not None:
            self._problem = self._problem or f"producer {producer}: {error}"
            self._sender.cancel()

    def _succeeded(self, producer: int, future: "Future[Any]", failed: dict[int, str]) -> bool:
        try:
            future.result()
        except (PeerLostError, EngineError) as error:  # gone, or without a working engine: of no further use
            failed[producer] = str(error)
        except RunError as error:
            logger.warning("producer %d: %s", producer, error)
        else:
            return True
        return False

    def _give_up_in_time(self, version: int) -> None:
        self._num_fruitless += 1
        if self._num_fruitless >= MAX_ATTEMPTS:
            raise RunError(f"weight sync to version {version} failed {MAX_ATTEMPTS} times: {self._problem}")


class StageSender:
    """The sending end on the head of another stage, which rank 0 directs."""

    def __init__(self, sender: WeightSender, hear: Callable[[], str], *, rank: int) -> None:
        """`hear` waits for what rank 0 announces. `rank`: the sender's, which is the stage's number, 1 or above."""
        self._sender = sender
        self._hear = hear
        self._rank = rank

    def take_part(self, weights: Weights) -> None:
        """One sync, this stage's share of it. A transfer that fails is a warning here: rank 0 reports it.

        Args:
            weights: of this stage; iterated to the end in any case.
        """
        with _to_the_end(weights):
            manifest, invitations, timeout_s = _parse_announcement(self._hear())
            if invitations:
                self._sender.join(invitations[self._rank - 1])
            try:
                self._sender.send(manifest, weights, timeout_s=timeout_s)
            except TransferError as error:
                logger.warning("weight transfer to version %d failed: %s", manifest.policy_version, error)

    def close(self) -> None:
        """Leave the group, if any."""
        self._sender.close()


@contextmanager
def _to_the_end(weights: Weights) -> Iterator[None]:
    """Whatever happens in between, `weights` has been iterated to its end afterwards."""
    try:
        yield
    finally:
        # An iteration may hold collectives, such as tensor-parallel gathers; the other ranks of the stage iterate to
        # the end and would wait for ever for one that had stopped at a failed transfer.
        deque(weights, maxlen=0)


def _format_announcement(manifest: WeightManifest, invitations: tuple[Rendezvous, ...], timeout_s: float) -> str:
    return json.dumps(
        {
            "manifest": manifest.to_json(),
            "rendezvous": [invitation.to_json() for invitation in invitations],  # of senders 1, 2, ...
            "timeout_s": float(timeout_s),
        }
    )


def _parse_announcement(text: str) -> tuple[WeightManifest, list[Rendezvous], float]:
    fields = parse_object(text, {"manifest": str, "rendezvous": list, "timeout_s": float}, what="announcement")
    invitations = [Rendezvous.from_json(invitation) for invitation in fields["rendezvous"]]
    return WeightManifest.from_json(fields["manifest"]), invitations, fields["timeout_s"]
