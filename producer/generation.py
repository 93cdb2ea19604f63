"""Ask an engine for samples on behalf of a leased prompt: what an environment is given as `generate`.

Each request has an id and a seed of its own, which depend on the lease, the episode and the turn alone, and not on what
else is in flight. The event loop's thread uses it; engines answer from theirs, and agents' episodes end from the
gateway's. G is the lease's group size: if it has a baseline, episode G, and of samples outside of episodes the one
after the first G, is greedy in all its turns.
"""

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from coati_rl.errors import ContextLengthError, RolloutError
from coati_rl.observability.timeline import Span, Timeline
from coati_rl.protocols import GenerationEngine, OnTokens
from coati_rl.types import Completion, GenerationRequest, GenerationResult, Lease, SamplingParams
from producer.environments.step_sampling import with_step_sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """Hold a request that the engine has."""

    request_id: str
    future: Future[GenerationResult]
    answered: asyncio.Event
    span: Span

    async def completions(self) -> tuple[Completion, ...]:
        """Wait for the answer."""
        await self.answered.wait()
        result = self.future.result()
        self.span.end(tokens=sum(len(completion.token_ids) for completion in result.completions))
        if result.error is not None:
            raise (ContextLengthError if result.is_too_long else RolloutError)(result.error)
        return result.completions


class LeaseGenerate:
    """Implement `Generate` for the episodes of one lease; `close` ends them.

    Args:
        lease: what is sampled, and how.
        engine: that is asked.
        call_soon: from any thread, has the event loop call a function.
        min_policy_version: of the weights that sample the first token of a request.
        timeline: of the producer.
        again: times that leases of this producer have become void: one that is issued again under the same id has
            requests of other names, as the engine may still be ending the first ones.
    """

    def __init__(
        self,
        lease: Lease,
        engine: GenerationEngine,
        *,
        call_soon: Callable[[Callable[[], object]], object],
        min_policy_version: int,
        timeline: Timeline,
        again: int = 0,
    ) -> None:
        self._lease = lease
        self._name = f"lease-{lease.lease_id}" + (f".{again}" if again else "")
        self._engine = engine
        self._call_soon = call_soon
        self._min_policy_version = min_policy_version
        self._timeline = timeline
        self._num_requests = 0
        self._num_samples = 0  # asked for so far, outside of episodes
        self._turns: Counter[int] = Counter()  # asked for so far, by episode
        self._ended: set[int] = set()  # episodes
        self._is_closed = False
        self._submitting = threading.Lock()  # so that an episode that has ended is not opened again by a call
        self.cut = asyncio.Event()  # see `Generate.cut`

    @property
    def temperature(self) -> float:
        return self._lease.sampling.temperature

    @property
    def sampling(self) -> SamplingParams:
        return self._lease.sampling

    async def __call__(
        self,
        token_ids: Sequence[int],
        *,
        num_samples: int = 1,
        episode: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> tuple[Completion, ...]:
        num_sampled = self._num_sampled(num_samples, episode)
        # A stream counts the samples of a request, and shows those that come first.
        parts = (
            (num_sampled, False, on_tokens),
            (num_samples - num_sampled, True, None if num_sampled else on_tokens),
        )
        with self._submitting:
            if self._is_closed or episode in self._ended:  # commits would wait for it, and nobody would end it
                raise RolloutError("the episode has ended")
            asked = [  # both, before any is waited for
                self._submit(token_ids, num, episode, sampling or {}, to, is_greedy=is_greedy)
                for num, is_greedy, to in parts
                if num > 0
            ]
        try:
            return tuple([completion for each in asked for completion in await each.completions()])
        except BaseException:
            for each in asked:
                if not each.answered.is_set():
                    self._engine.abort(each.request_id)  # nobody waits for it any more
            raise

    def end_episode(self, episode: int) -> None:
        with self._submitting:
            self._ended.add(episode)
            if episode in self._turns:
                self._engine.close_episode(self._episode_id(episode))

    def close(self) -> None:
        """End the episodes, so that a commit waits for them no longer, and refuse further calls."""
        with self._submitting:
            self._is_closed = True
        for episode in self._turns:
            self.end_episode(episode)

    def _num_sampled(self, num_samples: int, episode: int | None) -> int:
        """Return how many of the next samples, of an episode or outside of episodes, are not greedy."""
        if not self._lease.has_baseline:
            return num_samples
        group_size = self._lease.group_size
        if episode is not None:
            return num_samples if episode < group_size else 0
        return min(num_samples, max(0, group_size - self._num_samples))

    def _submit(
        self,
        token_ids: Sequence[int],
        num_samples: int,
        episode: int | None,
        changes: Mapping[str, Any],
        on_tokens: OnTokens | None,
        *,
        is_greedy: bool,
    ) -> _Asked:
        lease = self._lease
        number = f"/{self._num_requests}" if self._num_requests else ""
        sampling = with_step_sampling(self._sampling(num_samples, episode), changes)
        request = GenerationRequest(
            request_id=f"{self._name}{number}",
            token_ids=tuple(token_ids),
            num_samples=num_samples,
            # Whatever an environment or an agent asks for: it may change its mind from turn to turn.
            sampling=replace(sampling, temperature=0.0, top_p=1.0, top_k=None, min_p=0.0) if is_greedy else sampling,
            min_policy_version=self._min_policy_version,
            episode_id=None if episode is None else self._episode_id(episode),
        )
        self._num_requests += 1
        span, answered = self._timeline.start("generate", uid=lease.prompt.uid), asyncio.Event()
        future = self._engine.submit(request, on_tokens)
        future.add_done_callback(lambda _: self._call_soon(answered.set))
        return _Asked(request_id=request.request_id, future=future, answered=answered, span=span)

    def _sampling(self, num_samples: int, episode: int | None) -> SamplingParams:
        """The lease's sampling with a seed that no other sample of it has: sample i of a request uses seed + i."""
        sampling = self._lease.sampling
        if episode is None:
            self._num_samples += num_samples
            return replace(sampling, seed=sampling.seed + self._num_samples - num_samples)
        turn = self._turns[episode]
        if turn == 0:
            self._engine.open_episode(self._episode_id(episode))
        self._turns[episode] += 1
        digest = hashlib.blake2b(f"{sampling.seed}/{episode}/{turn}".encode(), digest_size=6).digest()
        return replace(sampling, seed=int.from_bytes(digest, "big"))

    def _episode_id(self, episode: int) -> str:
        return f"{self._name}-{episode}"
