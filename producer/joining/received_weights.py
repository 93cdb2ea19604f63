"""Get weight updates of a run over HTTPS, prove each by its digest, and have the engine on this machine serve them.

The engine receives them as from a trainer: this process is the sender of a group of its own.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from coati_rl.errors import RunError, TransferError
from coati_rl.probe import ProbeAnswer
from coati_rl.protocols import GenerationEngine
from coati_rl.transport.choice import choose_backend
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.wire import WeightSender
from coati_rl.types import CommitResult
from producer.joining.client import JoinConnection
from producer.joining.frames import Frame, commit_frame
from producer.joining.weight_copy import WeightCopy

logger = logging.getLogger(__name__)

_PROBE_S = 50.0


class JoinedWeights:
    """Answer the run's orders to commit, on a thread of its own."""

    def __init__(
        self, connection: JoinConnection, engine: GenerationEngine, on_error: Callable[[Exception], None]
    ) -> None:
        """Start. `on_error` gets what ends it."""
        self._connection, self._engine, self._on_error = connection, engine, on_error
        self._copy: WeightCopy | None = None
        self._sender: WeightSender | None = None
        self._invitation: Any = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after what is being committed."""
        self._is_over.set()
        self._thread.join(timeout=10.0)
        if self._sender is not None:
            self._sender.close()

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                order = self._connection.ask("order").fields["order"]
                if order is not None:
                    self._connection.ask("committed", self._commit(order))
        except Exception as error:  # noqa: BLE001 - the rollout loop raises it
            if not self._is_over.is_set():
                self._on_error(error)

    def _commit(self, order: dict[str, Any]) -> Frame:
        """Carry out an order. Returns: its result, or the error that makes this producer useless."""
        begin, manifest = time.perf_counter(), WeightManifest.from_json(order["manifest"])
        version, timeout_s, probe = manifest.policy_version, float(order["timeout_s"]), tuple(order["probe"])
        try:
            copy = self._fetch(manifest, order["digest"])
            self._stage(copy, timeout_s)
            identities = self._engine.commit_weights(version, in_flight=order["in_flight"], timeout_s=timeout_s)
            seconds = time.perf_counter() - begin
            answer = ProbeAnswer(logprobs=np.empty(0, dtype=np.float32))
            if probe:
                answer = self._engine.probe(probe, timeout_s=_PROBE_S)
            result = CommitResult(
                seconds=seconds, probe_logprobs=answer.logprobs, identities=identities, probe_routes=answer.routes
            )
        except RunError as error:
            return Frame(fields={"error": str(error), "digest": ""})
        logger.info("serves version %d, digest %s", version, copy.digest)
        return commit_frame(result, digest=copy.digest)

    def _fetch(self, manifest: WeightManifest, digest: str) -> WeightCopy:
        """Get an update, as what differs from the last one if that is here; else, or if it is damaged, whole."""
        copy = self._copy
        if copy is None or not copy.has_layout_of(manifest):
            copy = WeightCopy(manifest)
        self._copy = copy
        base = copy.digest
        copy.rename(manifest)
        try:
            self._fetch_buckets(copy, base)
            copy.prove(digest)
        except TransferError as error:
            if not base:
                raise
            logger.warning("%s; the whole is fetched", error)
            self._fetch_buckets(copy, "")
            copy.prove(digest)
        return copy

    def _fetch_buckets(self, copy: WeightCopy, base: str) -> None:
        num_bytes = 0
        for index in range(len(copy.buckets)):
            reply = self._connection.ask("bucket", version=copy.manifest.policy_version, index=index, base=base)
            is_delta = bool(reply.fields["is_delta"])
            if is_delta and not base:
                raise TransferError("the whole was asked for, and a difference came")
            copy.apply(index, reply.payload, is_delta=is_delta)
            num_bytes += len(reply.payload)
        total = copy.manifest.total_bytes
        logger.info("version %d came as %d bytes of %d", copy.manifest.policy_version, num_bytes, total)

    def _stage(self, copy: WeightCopy, timeout_s: float) -> None:
        """Send the update to the engine here. Raises: TransferError if it has other bytes."""
        if self._sender is None:
            num_bytes = copy.manifest.total_bytes
            backend = choose_backend("auto", device="cpu", is_one_node=True, update_bytes=num_bytes)
            self._sender = WeightSender(backend=backend)
        if not self._sender.is_open:
            (self._invitation,) = self._sender.open([1])
        with ThreadPoolExecutor(1) as pool:
            staging = pool.submit(self._engine.stage_weights, copy.manifest, self._invitation, timeout_s=timeout_s)
            staging.add_done_callback(self._cancel_on_error)
            sent = self._sender.send(copy.manifest, copy.tensors, timeout_s=timeout_s)
            if {sent, *staging.result()} != {copy.digest}:
                raise TransferError(f"the engine has staged {staging.result()}, the run's digest is {copy.digest}")

    def _cancel_on_error(self, staging: "Future[Any]") -> None:
        if self._sender is not None and staging.exception() is not None:
            self._sender.cancel()
