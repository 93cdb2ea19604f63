"""Policy weights -> producers, in two phases. All stage the update beside the serving weights; if every digest is
the sender's, all commit it. A producer that is dead or does not answer is reported as failed; when a transfer breaks
for the others too, they keep their old weights and the coordinator orders the sync again.
"""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from coati_rl.data.work import SyncReport, SyncWork
from coati_rl.errors import PeerLostError, RunError, TransferError
from coati_rl.protocols import WeightReceiver
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.wire import WeightSender

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # of one version, when no producer is to blame


class WeightPublisher:
    """The sending end; used by trainer rank 0."""

    def __init__(
        self,
        sender: WeightSender,
        connect: Callable[[int], WeightReceiver],
        make_manifest: Callable[[int], WeightManifest],
        *,
        ranks_per_producer: int,
        timeout_s: float,
        drain_timeout_s: float,
    ) -> None:
        self._sender = sender
        self._connect = connect
        self._make_manifest = make_manifest  # policy version -> what will be sent
        self._ranks_per_producer = ranks_per_producer
        self._timeout_s = timeout_s  # of the transfer
        self._drain_timeout_s = drain_timeout_s  # of the commit, which waits for what is generating to end
        self._group: tuple[int, ...] = ()  # producers of the open group
        self._rendezvous: list[Rendezvous] = []  # their invitations
        self._num_fruitless = 0

    def publish(self, work: SyncWork, weights: Iterator[tuple[str, torch.Tensor]]) -> SyncReport:
        """One sync, staged and committed, with a deadline for each phase.

        Raises: RunError when it fails again and again without a producer being gone.
        """
        begin, failed = time.perf_counter(), dict[int, str]()
        with ThreadPoolExecutor(len(work.members)) as pool:
            digest, staged = self._stage(pool, work, weights, failed)
            committing = {
                producer: pool.submit(
                    self._connect(producer).commit_weights, work.policy_version, timeout_s=self._drain_timeout_s
                )
                for producer in staged
            }
            committed = tuple(p for p, future in committing.items() if self._succeeded(p, future, failed))
        if committed or failed:
            self._num_fruitless = 0
        else:
            self._give_up_in_time(work.policy_version)
        return SyncReport(
            index=work.index,
            committed=committed,
            failed=failed,
            seconds=time.perf_counter() - begin,
            digest=digest,
        )

    def _stage(
        self,
        pool: ThreadPoolExecutor,
        work: SyncWork,
        weights: Iterator[tuple[str, torch.Tensor]],
        failed: dict[int, str],
    ) -> tuple[str, list[int]]:
        """Returns: the digest sent and the producers that hold it."""
        manifest = self._make_manifest(work.policy_version)
        if work.members != self._group or not self._sender.is_open:
            self._rendezvous = self._sender.open([self._ranks_per_producer] * len(work.members))
            self._group = work.members
        staging = {
            producer: pool.submit(
                self._connect(producer).stage_weights, manifest, rendezvous, timeout_s=self._timeout_s
            )
            for producer, rendezvous in zip(work.members, self._rendezvous, strict=True)
        }
        for future in staging.values():
            future.add_done_callback(self._cancel_on_error)
        try:
            digest = self._sender.send(manifest, weights, timeout_s=self._timeout_s)
        except TransferError as error:
            logger.warning("weight transfer to version %d failed: %s", work.policy_version, error)
            digest = ""
        staged = [p for p, future in staging.items() if self._succeeded(p, future, failed)]
        if len(staged) < len(work.members) or not digest:
            self._sender.close()
            return digest, []
        for producer in staged:
            digests = set(staging[producer].result())
            if digests != {digest}:
                raise RunError(f"producer {producer} received {sorted(digests)}, sent was {digest}: a corrupt transfer")
        return digest, staged

    def _cancel_on_error(self, future: "Future[Any]") -> None:
        if future.exception() is not None:
            self._sender.cancel()

    def _succeeded(self, producer: int, future: "Future[Any]", failed: dict[int, str]) -> bool:
        try:
            future.result()
        except PeerLostError as error:
            failed[producer] = str(error)
        except RunError as error:
            logger.warning("producer %d: %s", producer, error)
        else:
            return True
        return False

    def _give_up_in_time(self, version: int) -> None:
        self._num_fruitless += 1
        if self._num_fruitless >= MAX_ATTEMPTS:
            raise RunError(f"weight sync to version {version} failed {MAX_ATTEMPTS} times; see the producers' logs")
