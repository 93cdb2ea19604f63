"""Send policy weights to the producers in two phases, stage and commit.

First all producers receive the update beside the serving weights. If every digest equals the sender's, each producer
commits the update as soon as it can, while training continues. A producer that is dead or does not answer is reported
as failed; if that breaks the transfer, the other producers keep their weights and the coordinator orders a new sync.

With pipeline parallelism the head rank of each pipeline stage sends that stage's tensors: rank 0 directs the transfer
and broadcasts an announcement to the other heads once per sync.
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
from coati_rl.model_files.identity import weights_identity
from coati_rl.protocols import SyncReports, WeightReceiver
from coati_rl.transport.manifest import WeightManifest, parse_object
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.wire import WeightSender
from coati_rl.work import CommitReport, SyncReport, SyncWork

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # failed transfers in a row for which no producer was reported as failed

Weights = Iterator[tuple[str, torch.Tensor]]


class WeightPublisher:
    """Direct weight syncs and send the first pipeline stage's weights, on trainer rank 0."""

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
        commits_at_once: bool = True,
    ) -> None:
        """Store the arguments.

        `announce` broadcasts a text to the `StageSender` of every other pipeline stage. Without `commits_at_once`
        producers commit from `start_commits` on.
        """
        self._sender = sender
        self._connect = connect
        self._make_manifest = make_manifest  # from a policy_version; describes what all senders send
        self._reports = reports
        self._ranks_per_producer = ranks_per_producer
        self._timeout_s = timeout_s  # of the transfer
        self._commit_timeout_s = commit_timeout_s  # a commit may wait for running requests to end
        self._num_senders = num_senders
        self._announce = announce
        self._commits_at_once = commits_at_once
        self._waiting: list[tuple[int, SyncWork]] = []  # commits that are not started
        self._group: tuple[int, ...] = ()  # producers of the open transfer group
        self._rendezvous: list[Rendezvous] = []  # their invitations
        self._num_failed_attempts = 0  # in a row
        self._unreported: Exception | None = None
        self._problem = ""  # first error of the last transfer

    def publish(self, work: SyncWork, weights: Weights) -> None:
        """Run one sync; returns when all producers have staged it. Commits run and are reported in the background.

        Args:
            work: the sync's version, members and probe.
            weights: of this rank's pipeline stage; always iterated to the end.
        Raises: RunError after MAX_ATTEMPTS failures in a row without a failed producer.
        """
        if self._unreported is not None:
            raise RunError(f"a commit could not be reported: {self._unreported}") from self._unreported
        begin, failed = time.perf_counter(), dict[int, str]()
        with ThreadPoolExecutor(len(work.members)) as pool, iterate_to_end(weights):
            manifest = self._make_manifest(work.policy_version)
            digest, staging = self._transfer(pool, work, manifest, weights)
            staged = tuple(self._staged_producers(digest, staging, failed))
        if staged or failed:
            self._num_failed_attempts = 0
        else:
            self._count_failed_attempt(work.policy_version)
        seconds = time.perf_counter() - begin
        # Reported before the commits, so that no producer gets a prompt between this report and its commit.
        report = SyncReport(index=work.index, staged=staged, failed=failed, seconds=seconds, digest=digest)
        identity = weights_identity(manifest.base, digest)
        num_bytes = manifest.total_bytes
        self._reports.report_sync(replace(report, problem=self._problem, identity=identity, num_bytes=num_bytes))
        self._waiting += [(producer, work) for producer in staged]
        if self._commits_at_once:
            self.start_commits()

    def start_commits(self) -> None:
        """Let the producers commit what they have staged, in the background."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            threading.Thread(target=self._commit, args=each, name=f"commit-{each[0]}", daemon=True).start()

    def _transfer(
        self, pool: ThreadPoolExecutor, work: SyncWork, manifest: WeightManifest, weights: Weights
    ) -> tuple[str, dict[int, "Future[tuple[str, ...]]"]]:
        """Send the weights. Returns: their digest, empty if the transfer failed, and a future of each answer."""
        self._problem = ""
        invitations: tuple[Rendezvous, ...] = ()  # empty: the last sync's group is used again
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
            logger.warning("the weight transfer of version %d failed: %s", work.policy_version, error)
            return "", staging

    def _staged_producers(
        self, digest: str, staging: dict[int, "Future[tuple[str, ...]]"], failed: dict[int, str]
    ) -> list[int]:
        """Wait for all answers. Returns: the producers that staged the update, either all or none of them."""
        staged = [p for p, future in staging.items() if self._succeeded(p, future, failed)]
        if len(staged) < len(staging) or not digest:
            self._sender.close()
            return []
        for producer in staged:
            digests = set(staging[producer].result())
            if digests != {digest}:
                raise RunError(
                    f"corrupt weight transfer: producer {producer} received weights with digests {sorted(digests)}, "
                    f"the trainers sent {digest}; check the network, or use another --weight-transport"
                )
        return staged

    def _stage(self, producer: int, manifest: WeightManifest, rendezvous: Rendezvous) -> tuple[str, ...]:
        return self._connect(producer).stage_weights(manifest, rendezvous, timeout_s=self._timeout_s)

    def _commit(self, producer: int, work: SyncWork) -> None:
        """Let a producer commit, and report the result; runs on a thread per producer."""
        report = CommitReport(producer=producer, policy_version=work.policy_version)
        try:
            connection = self._connect(producer)
            result = connection.commit_weights(work.policy_version, work.probe, timeout_s=self._commit_timeout_s)
            report = replace(report, result=result)
        except Exception as error:  # noqa: BLE001  (reported; the producer is replaced on any error)
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
        except (PeerLostError, EngineError) as error:  # the producer is gone, or its engine does not work
            failed[producer] = str(error)
        except RunError as error:
            logger.warning("producer %d did not stage the weights: %s", producer, error)
        else:
            return True
        return False

    def _count_failed_attempt(self, version: int) -> None:
        self._num_failed_attempts += 1
        if self._num_failed_attempts >= MAX_ATTEMPTS:
            raise RunError(f"the weight sync to version {version} failed {MAX_ATTEMPTS} times: {self._problem}")


class StageSender:
    """Send the weights of a pipeline stage other than the first, on its head rank, as rank 0 announces."""

    def __init__(self, sender: WeightSender, receive_announcement: Callable[[], str], *, rank: int) -> None:
        """Store the arguments.

        Args:
            sender: this rank's end of the transfer.
            receive_announcement: waits for rank 0's next announcement.
            rank: the sender's rank, which is the pipeline stage's number, 1 or above.
        """
        self._sender = sender
        self._receive_announcement = receive_announcement
        self._rank = rank

    def send(self, weights: Weights) -> None:
        """Send this pipeline stage's weights in one sync. A failed transfer is logged here and reported by rank 0.

        Args:
            weights: of this pipeline stage; always iterated to the end.
        """
        with iterate_to_end(weights):
            manifest, invitations, timeout_s = _parse_announcement(self._receive_announcement())
            if invitations:
                self._sender.join(invitations[self._rank - 1])
            try:
                self._sender.send(manifest, weights, timeout_s=timeout_s)
            except TransferError as error:
                logger.warning("the weight transfer of version %d failed: %s", manifest.policy_version, error)

    def close(self) -> None:
        """Close the transfer group, if there is one."""
        self._sender.close()


@contextmanager
def iterate_to_end(weights: Weights) -> Iterator[None]:
    """Iterate `weights` to the end after the body, also if the body raised an error."""
    try:
        yield
    finally:
        # An iteration may contain collectives, such as tensor-parallel gathers: the other ranks of the stage iterate to
        # the end and would block if this one stopped at a failed transfer.
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
