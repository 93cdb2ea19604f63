"""Submit leased prompts to an engine, up to a number of samples in flight, and collect the results.

In: leases. Out: the engine's results in the order in which they finish. Not thread-safe, except `wake`. G is the group
size.
"""

import queue
from concurrent.futures import Future
from dataclasses import dataclass

from coati_rl.errors import EngineError
from coati_rl.observability.timeline import Span, Timeline
from coati_rl.protocols import GenerationEngine
from coati_rl.types import GenerationRequest, GenerationResult, Lease


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """Hold a lease and the engine's result for it."""

    lease: Lease
    result: GenerationResult


@dataclass(frozen=True, kw_only=True, slots=True)
class _Generating:
    lease: Lease
    request_id: str
    span: Span


class LeaseGenerator:
    """Submit one request per lease; a finished request makes room for the next at once."""

    def __init__(self, engine: GenerationEngine, *, max_sequences: int, group_size: int, timeline: Timeline) -> None:
        """Start with nothing in flight.

        Args:
            engine: generates the samples.
            max_sequences: largest number of samples in flight, that is of max_sequences / G training prompts.
            group_size: G. A prompt with fewer samples counts as one of G, so that an evaluation does not change the
                order and the batches in which training prompts are sampled, and with them the weights.
            timeline: records the spans of generation.
        """
        self._engine = engine
        self._max_sequences = max_sequences
        self._group_size = group_size
        self._timeline = timeline
        self._generating: dict[Future[GenerationResult], _Generating] = {}
        self._done: queue.SimpleQueue[Future[GenerationResult] | None] = queue.SimpleQueue()  # None: a wake-up

    @property
    def is_drained(self) -> bool:
        """Return True if no request is running."""
        return not self._generating

    def room(self) -> int:
        """Return the number of prompts, of G samples each, that may be submitted now."""
        num_sequences = sum(max(one.lease.group_size, self._group_size) for one in self._generating.values())
        return max(0, self._max_sequences - num_sequences) // self._group_size

    def submit(self, lease: Lease, *, min_policy_version: int) -> None:
        """Submit a lease's prompt to the engine. Raises: EngineError if the engine has ended."""
        request = GenerationRequest(
            request_id=f"lease-{lease.lease_id}",
            token_ids=lease.prompt.token_ids,
            num_samples=lease.group_size,
            sampling=lease.sampling,
            min_policy_version=min_policy_version,
        )
        span = self._timeline.start("generate", uid=lease.prompt.uid)
        future = self._engine.submit(request)
        self._generating[future] = _Generating(lease=lease, request_id=request.request_id, span=span)
        future.add_done_callback(self._done.put)

    def take_finished(self, timeout_s: float) -> list[Generated]:
        """Wait for the first finished request, or a wake-up, and return all finished requests.

        Raises: EngineError if the engine has ended and all requests that finished before have been returned.
        """
        finished: list[Generated] = []
        try:
            future = self._done.get(timeout=timeout_s) if timeout_s > 0.0 else self._done.get_nowait()
            while True:
                if future is not None:
                    finished.append(self._take(future))
                future = self._done.get_nowait()
        except queue.Empty:
            pass
        except EngineError:
            if not finished:
                raise
        if not finished:
            self._engine.check_alive()  # with nothing in flight, no future would report a failure
        return finished

    def wake(self, _: object = None) -> None:
        """End a wait in `take_finished`; usable as a callback of other futures that the caller waits for."""
        self._done.put(None)

    def abort(self) -> None:
        """Abort all running requests; their results are not awaited."""
        for one in self._generating.values():
            self._engine.abort(one.request_id)

    def _take(self, future: "Future[GenerationResult]") -> Generated:
        one, result = self._generating.pop(future), future.result()
        one.span.end(tokens=sum(len(completion.token_ids) for completion in result.completions))
        return Generated(lease=one.lease, result=result)
