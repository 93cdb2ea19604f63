"""Run a generation engine on its own thread, fed by a queue of requests and calls, with futures as results.

Consumes: requests and calls, in order of arrival. Waits for: the queue, while there is nothing to generate. Is
unblocked by: any submission or call, which is served between two steps of the model. Produces: results, in futures.

Engines are not thread-safe and a step may take long, while an actor must answer at any time; hence the thread. Each
backend implements `EngineCore`, whose methods run on the owner thread only. While a commit waits for open episodes, new
episodes are held back; a request that asks for a newer policy_version waits until it serves.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress

from coati_rl.errors import CoatiError, EngineError, TransferError, TransferTimeoutError
from coati_rl.observability.phases import PHASES
from coati_rl.probe import ProbeAnswer
from coati_rl.protocols import OnTokens
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import GenerationRequest, GenerationResult, SamplingParams
from producer.engines.admission import (
    AdmissionQueue,
    RequestRefusedError,
    RequestTooLongError,
    Submission,
    check_request,
)
from producer.engines.answers import Answers, Result, answer, refuse
from producer.engines.engine_core import EngineCore
from producer.engines.pending_commit import PendingCommit
from producer.engines.token_stream import TokenStream

logger = logging.getLogger(__name__)

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.0005, 0.01  # between two polls of a running transfer
_LATE = "the engine thread did not answer in time: one step takes too long"
_CLOSE_TIMEOUT_S = 30.0  # for the current step to end
_GRACE_S = 5.0  # time after a call's own deadline at which the engine thread counts as blocked


class ThreadedEngine:
    """Implement `coati_rl.protocols.GenerationEngine` on top of an `EngineCore`."""

    def __init__(self, core: EngineCore, *, policy_version: int = 0) -> None:
        """Start loading in the background; `policy_version` is that of the weights on disk, -1 if unproven."""
        self._core = core
        self.policy_version = core.policy_version = policy_version  # of the weights that serve now
        self._staged_version: int | None = None
        self._staging = threading.Lock()  # one transfer at a time
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._commit: PendingCommit | None = None  # this and the next: used by the owner thread only
        self._is_asleep = False
        self._admission = AdmissionQueue()
        self._answers = Answers()
        self._closing = False
        self._ready: Future[None] = Future()
        self._answers.add_call(self._ready)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the model is loaded; the other methods may be called before. Raises: EngineError."""
        try:
            self._ready.result(timeout=timeout_s)
        except FutureTimeoutError:
            raise EngineError(f"the engine did not load within {timeout_s:g} s") from None

    def submit(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> Future[GenerationResult]:
        future = self._answers.add_request(request)
        stream = None if on_tokens is None else TokenStream(request.request_id, on_tokens)
        self._inbox.put(lambda: self._add(Submission(request=request, stream=stream)))
        return future

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Future[GenerationResult]]:
        futures: list[Future[GenerationResult]] = []
        try:
            for request in requests:
                futures.append(self._answers.add_request(request))
            return futures
        finally:  # those before one that is refused have futures, too
            queued = [Submission(request=request, stream=None) for request in requests[: len(futures)]]
            self._inbox.put(lambda: [*map(self._add, queued)])

    def abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._abort(request_id))

    def num_sequences(self) -> int:
        return self._answers.num_sequences()

    def check_alive(self) -> None:
        self._answers.check_alive()

    def open_episode(self, episode_id: str) -> None:
        self._answers.open_episode(episode_id)

    def close_episode(self, episode_id: str) -> None:
        self._answers.close_episode(episode_id)
        self._inbox.put(lambda: self._admission.close_episode(episode_id))

    def stage_weights(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> tuple[str, ...]:
        """See `GenerationEngine.stage_weights`; generation continues meanwhile."""
        end = time.monotonic() + timeout_s + _GRACE_S
        with self._staging:
            self._call(lambda: self._start_staging(manifest, rendezvous, timeout_s), until=end)
            begin = time.monotonic()
            while True:
                digests = self._call(self._core.poll_staging, until=end)
                if digests is not None:
                    self._staged_version = manifest.policy_version
                    return digests
                time.sleep(min(_MAX_PAUSE_S, _MIN_PAUSE_S + (time.monotonic() - begin) / 50))  # 2 % late at most

    def commit_weights(self, policy_version: int, *, in_flight: bool, timeout_s: float) -> tuple[str, ...]:
        deadline = time.monotonic() + timeout_s

        def serve(future: Future[tuple[str, ...]]) -> None:
            if self._commit is not None:
                raise EngineError(f"the commit of version {self._commit.policy_version} is still pending")
            self._check_staged(policy_version)
            self._commit = PendingCommit(
                policy_version=policy_version, in_flight=in_flight, deadline=deadline, future=future
            )

        late = EngineError(f"committing version {policy_version}: {_LATE}")
        return self._ask(serve, until=deadline + _GRACE_S, late=late)

    def sleep(self, *, timeout_s: float) -> None:
        self._call(self._sleep, until=time.monotonic() + timeout_s, what="going to sleep")

    def probe(self, token_ids: Sequence[int], *, timeout_s: float) -> ProbeAnswer:
        sampling = SamplingParams(max_new_tokens=1)
        probe = GenerationRequest(request_id="probe", token_ids=tuple(token_ids), num_samples=1, sampling=sampling)

        def serve(future: Future[ProbeAnswer]) -> None:
            try:
                check_request(probe, vocab_size=self._core.vocab_size, max_model_len=self._core.max_model_len)
                self._core.probe(probe.token_ids, lambda found: answer(future, found))
            except RequestRefusedError as error:
                raise EngineError(f"a probe was refused: {error}") from error

        return self._ask(serve, until=time.monotonic() + timeout_s, late=EngineError(f"probing: {_LATE}"))

    def close(self) -> None:
        self._closing = True
        self._inbox.put(lambda: None)  # wakes the thread
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_CLOSE_TIMEOUT_S)
        self._answers.fail("the engine is closed", None)  # also if its last step does not end

    # ---- the caller's side ----

    def _call(self, function: Callable[[], Result], *, until: float, what: str = "staging") -> Result:
        """Run `function` on the owner thread between two steps. Returns: its result."""
        return self._ask(
            lambda future: answer(future, function()), until=until, late=TransferTimeoutError(f"{what}: {_LATE}")
        )

    def _ask(self, serve: Callable[[Future[Result]], None], *, until: float, late: CoatiError) -> Result:
        """Let the owner thread call `serve` with a future, and wait for its result; raise `late` after `until`."""
        future: Future[Result] = Future()

        def guarded() -> None:
            if not future.cancelled():
                try:
                    serve(future)
                except CoatiError as error:
                    refuse(future, error)
            # Any other exception ends the engine, which then fails all pending calls.

        self._answers.add_call(future)
        self._inbox.put(guarded)
        try:
            return future.result(timeout=max(0.0, until - time.monotonic()))
        except FutureTimeoutError:
            if not future.cancel():
                late = type(late)(f"{late}; the operation has begun and may still finish")
            raise late from None
        finally:
            self._answers.discard_call(future)

    # ---- the owner thread's side ----

    def _run(self) -> None:
        try:
            self._core.load()
            answer(self._ready, None)
            while not self._closing:
                self._serve_inbox()
                self._serve_commit()
                if self._num_running() and not self._closing:
                    with PHASES.phase("engine step"):
                        results = self._core.step()
                    self._publish(results)
            self._answers.fail("the engine is closed", None)
        except BaseException as error:
            logger.debug("engine thread ended", exc_info=error)
            message = str(error) if isinstance(error, CoatiError) else f"{type(error).__name__}: {error}"
            self._answers.fail(f"the engine died: {message}", error)
        finally:
            with suppress(Exception):  # it may be broken already, and its failure is reported
                self._core.close()

    def _serve_inbox(self) -> None:
        """Run all queued calls; wait for one if there is nothing else to do."""
        wait_s = self._may_wait_s()
        with suppress(queue.Empty):
            while not self._closing:
                call = self._inbox.get(block=wait_s != 0.0, timeout=wait_s)
                wait_s = 0.0
                call()

    def _may_wait_s(self) -> float | None:
        """Return how long the thread may wait for calls, in seconds; None: without limit, since nothing is pending."""
        if self._num_running():
            return 0.0
        if self._commit is None:
            return None
        if self._commit.is_due(0, self._admission.open_episodes()):
            return 0.0
        return max(0.0, self._commit.deadline - time.monotonic())

    def _sleep(self) -> None:
        if not self._is_asleep:
            self._publish(self._core.sleep())
            self._is_asleep = True

    def _num_running(self) -> int:
        return 0 if self._is_asleep else self._core.num_running()

    def _add(self, submission: Submission) -> None:
        request = submission.request
        if not self._admission.admits(
            submission, policy_version=self.policy_version, is_committing=self._commit is not None
        ):
            return
        try:
            check_request(request, vocab_size=self._core.vocab_size, max_model_len=self._core.max_model_len)
            self._core.add(request, submission.stream)
        except RequestRefusedError as error:
            is_long = isinstance(error, RequestTooLongError)
            self._publish([GenerationResult(request_id=request.request_id, error=str(error), is_too_long=is_long)])

    def _abort(self, request_id: str) -> None:
        result = self._admission.withdraw(request_id) or self._core.abort(request_id)
        if result is not None:
            self._publish([result])

    def _publish(self, results: list[GenerationResult]) -> None:
        for result in results:
            self._answers.resolve(result)

    def _start_staging(self, manifest: WeightManifest, rendezvous: Rendezvous, timeout_s: float) -> None:
        if manifest.policy_version < self.policy_version:  # the same one again is allowed: a group with a new member
            raise TransferError(
                f"version {manifest.policy_version} is older than version {self.policy_version}, which is serving"
            )
        self._staged_version = None
        self._core.start_staging(manifest, rendezvous, timeout_s=timeout_s)

    def _check_staged(self, policy_version: int) -> None:
        if self._staged_version != policy_version:
            raise EngineError(f"cannot commit version {policy_version}: the staged version is {self._staged_version}")

    def _serve_commit(self) -> None:
        """Execute the pending commit if it is due, or fail it at its deadline; then add the requests held for it."""
        commit = self._commit
        if commit is None:
            return
        num_running, episodes = self._num_running(), self._admission.open_episodes()
        try:
            if not commit.future.cancelled():
                if not commit.is_due(num_running, episodes):
                    commit.check_deadline(num_running, episodes)
                    return
                self._swap(commit)
        except CoatiError as error:
            refuse(commit.future, error)
        self._commit = None
        for submission in self._admission.release():
            self._add(submission)

    def _swap(self, commit: PendingCommit) -> None:
        self._check_staged(commit.policy_version)  # another transfer may have begun since
        if commit.begin():
            if self._is_asleep:
                self._core.wake()
                self._is_asleep = False
            with PHASES.phase("engine commit"):
                results = self._core.commit(commit.policy_version)
            self._staged_version = None
            self.policy_version = commit.policy_version
            self._publish(results)
            commit.future.set_result(self._core.identities)
