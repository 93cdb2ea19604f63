"""A generation engine that one thread owns: requests and control calls go in through a queue, results come out.

Consumes: requests and calls, in the order they arrived. Waits for: the queue, while there is nothing to generate.
Unblocked by: any submission or call, which is served between two steps of the model. Produces: results, for `poll`.

Engines are not thread-safe and a step may take long, while an actor must answer at any time; hence the thread. Each
backend implements `EngineCore`, whose methods run on the owner thread only.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from coati_rl.errors import CoatiError, EngineError, TransferError, TransferTimeoutError
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import GenerationRequest, GenerationResult
from producer.engines.admission import RequestRefusedError, check_request

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_MAX_PAUSE_S = 0.01  # between two looks at a running transfer
_GRACE_S = 5.0  # how much later than a transfer's own deadline the engine thread counts as stuck


class EngineCore(Protocol):
    """What a backend does, on the owner thread. A CoatiError leaves it as it was; any other exception ends it."""

    vocab_size: int  # valid after `load`
    max_model_len: int

    def load(self) -> None:
        """Load the model; called once, first."""

    def add(self, request: GenerationRequest, *, policy_version: int) -> None:
        """Queue a request. Raises: RequestRefusedError."""

    def has_work(self) -> bool:
        """True while a request is unfinished."""

    def step(self) -> list[GenerationResult]:
        """Make some progress; returns what finished."""

    def start_staging(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        """Check the manifest against the model and begin to receive, without blocking. Raises: TransferError."""

    def poll_staging(self) -> tuple[str, ...] | None:
        """Digests, one per rank, once all ranks have received; None before. Raises: TransferError."""

    def commit(self) -> None:
        """Load the staged weights and forget all that was cached under the old ones."""

    def close(self) -> None:
        """Release processes, sockets and memory."""


class ThreadedEngine:
    """A `coati_rl.protocols.GenerationEngine` on top of an `EngineCore`."""

    def __init__(self, core: EngineCore, *, policy_version: int = 0) -> None:
        """Starts to load at once and returns; `policy_version` is that of the weights on disk."""
        self._core = core
        self.policy_version = policy_version  # of the weights that serve now
        self._staged_version: int | None = None
        self._staging = threading.Lock()  # one transfer at a time
        self._inbox: queue.SimpleQueue[GenerationRequest | Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards all below
        self._results: list[GenerationResult] = []
        self._unfinished: set[str] = set()  # request ids
        self._failure: tuple[str, BaseException | None] | None = None
        self._pending: set[Future[Any]] = set()
        self._closing = False
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the model is loaded; the other methods may be called before. Raises: EngineError."""
        try:
            self._ready.result(timeout=timeout_s)
        except FutureTimeoutError:
            raise EngineError(f"the engine did not load within {timeout_s:g} s") from None

    def submit(self, request: GenerationRequest) -> None:
        """See `GenerationEngine.submit`."""
        with self._changed:
            self._raise_failure()
            if request.request_id in self._unfinished:
                raise EngineError(f"request {request.request_id!r} is unfinished: ids must differ")
            self._unfinished.add(request.request_id)
            self._inbox.put(request)

    def poll(self, timeout_s: float) -> list[GenerationResult]:
        """See `GenerationEngine.poll`."""
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._failure, timeout=timeout_s)
            results, self._results = self._results, []
            if not results:
                self._raise_failure()
            self._unfinished.difference_update(result.request_id for result in results)
            return results

    def num_unfinished(self) -> int:
        """See `GenerationEngine.num_unfinished`."""
        with self._changed:
            return len(self._unfinished)

    def stage_weights(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> tuple[str, ...]:
        """See `GenerationEngine.stage_weights`; generation goes on meanwhile."""
        end = time.monotonic() + timeout_s + _GRACE_S
        with self._staging:
            self._call(lambda: self._start_staging(manifest, rendezvous, timeout_s), until=end)
            pause_s = 0.0005
            while True:
                digests = self._call(self._core.poll_staging, until=end)
                if digests is not None:
                    self._staged_version = manifest.policy_version
                    return digests
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def commit_weights(self, policy_version: int) -> None:
        """See `GenerationEngine.commit_weights`; refused unless this very version is staged."""
        self._call(lambda: self._commit(policy_version))

    def close(self) -> None:
        """See `GenerationEngine.close`."""
        self._closing = True
        self._inbox.put(lambda: None)  # wakes the thread
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=30.0)

    # ---- the caller's side ----

    def _call(self, function: Callable[[], Result], *, until: float | None = None) -> Result:
        """Run `function` on the owner thread between two steps and return its result."""
        future: Future[Result] = Future()

        def serve() -> None:
            try:
                future.set_result(function())
            except CoatiError as error:
                future.set_exception(error)
            # Anything else ends the engine, which answers all pending calls.

        with self._changed:
            self._raise_failure()
            self._pending.add(future)
            self._inbox.put(serve)
        try:
            return future.result(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except FutureTimeoutError:
            raise TransferTimeoutError("the engine thread did not answer in time: one step takes too long") from None
        finally:
            with self._changed:
                self._pending.discard(future)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            message, cause = self._failure
            raise EngineError(message) from cause

    # ---- the owner thread's side ----

    def _run(self) -> None:
        try:
            self._core.load()
            self._ready.set_result(None)
            while not self._closing:
                self._serve_inbox()
                if self._core.has_work() and not self._closing:
                    self._publish(self._core.step())
            self._fail("the engine is closed", None)
        except BaseException as error:
            logger.debug("engine thread ended", exc_info=error)
            message = str(error) if isinstance(error, CoatiError) else f"{type(error).__name__}: {error}"
            self._fail(f"the engine died: {message}", error)
        finally:
            with suppress(Exception):  # it may be broken already, and its failure is known
                self._core.close()

    def _serve_inbox(self) -> None:
        """Take in everything that has arrived; wait for something if there is nothing to generate."""
        block = not self._core.has_work()
        with suppress(queue.Empty):
            while not self._closing:
                item = self._inbox.get(block=block)
                block = False
                if isinstance(item, GenerationRequest):
                    self._add(item)
                else:
                    item()

    def _add(self, request: GenerationRequest) -> None:
        try:
            check_request(request, vocab_size=self._core.vocab_size, max_model_len=self._core.max_model_len)
            self._core.add(request, policy_version=self.policy_version)
        except RequestRefusedError as error:
            self._publish([GenerationResult(request_id=request.request_id, error=str(error))])

    def _publish(self, results: list[GenerationResult]) -> None:
        if results:
            with self._changed:
                self._results += results
                self._changed.notify_all()

    def _start_staging(self, manifest: WeightManifest, rendezvous: Rendezvous, timeout_s: float) -> None:
        if manifest.policy_version < self.policy_version:  # the same one again is fine: a group with a new member
            raise TransferError(f"version {manifest.policy_version} is older than {self.policy_version}, which serves")
        self._staged_version = None
        self._core.start_staging(manifest, rendezvous, timeout_s=timeout_s)

    def _commit(self, policy_version: int) -> None:
        if self._staged_version != policy_version:
            raise EngineError(f"cannot commit version {policy_version}: staged is {self._staged_version}")
        if self._core.has_work():
            raise EngineError(f"cannot commit version {policy_version}: a request is running")
        self._core.commit()
        self._staged_version = None
        self.policy_version = policy_version

    def _fail(self, message: str, cause: BaseException | None) -> None:
        with self._changed:
            self._failure = (message, cause)
            for future in (self._ready, *self._pending):
                if not future.done():
                    error = EngineError(message)
                    error.__cause__ = cause
                    future.set_exception(error)
            self._changed.notify_all()
