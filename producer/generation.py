"""Ask an engine for samples on behalf of a leased prompt: what an environment is given as `generate`.

Each request has an id and a seed of its own, which depend on the lease, the episode and the turn alone, and not on what
else is in flight. The event loop's thread uses it; engines answer from theirs.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from coati_rl.errors import ContextLengthError, RolloutError
from coati_rl.observability.timeline import Timeline
from coati_rl.protocols import GenerationEngine, OnTokens
from coati_rl.types import Completion, GenerationRequest, Lease, SamplingParams
from producer.environments.step_sampling import with_step_sampling


class LeaseGenerate:
    """Implement `Generate` for the episodes of one lease; `close` ends them.

    Args:
        lease: what is sampled, and how.
        engine: that is asked.
        call_soon: from any thread, has the event loop call a function.
        min_policy_version: of the weights that sample the first token of a request.
        timeline: of the producer.
    """

    def __init__(
        self,
        lease: Lease,
        engine: GenerationEngine,
        *,
        call_soon: Callable[[Callable[[], object]], object],
        min_policy_version: int,
        timeline: Timeline,
    ) -> None:
        self._lease = lease
        self._engine = engine
        self._call_soon = call_soon
        self._min_policy_version = min_policy_version
        self._timeline = timeline
        self._num_requests = 0
        self._num_samples = 0  # asked for so far, outside of episodes
        self._turns: Counter[int] = Counter()  # asked for so far, by episode
        self.cut = asyncio.Event()  # see `Generate.cut`

    @property
    def temperature(self) -> float:
        """See `Generate`."""
        return self._lease.sampling.temperature

    @property
    def sampling(self) -> SamplingParams:
        """See `Generate`."""
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
        """See `Generate`."""
        lease = self._lease
        number = f"/{self._num_requests}" if self._num_requests else ""
        request = GenerationRequest(
            request_id=f"lease-{lease.lease_id}{number}",
            token_ids=tuple(token_ids),
            num_samples=num_samples,
            sampling=with_step_sampling(self._sampling(num_samples, episode), sampling or {}),
            min_policy_version=self._min_policy_version,
            episode_id=None if episode is None else self._episode_id(episode),
        )
        self._num_requests += 1
        span = self._timeline.start("generate", uid=lease.prompt.uid)
        future = self._engine.submit(request, on_tokens)
        answered = asyncio.Event()
        future.add_done_callback(lambda _: self._call_soon(answered.set))
        try:
            await answered.wait()
        except asyncio.CancelledError:
            self._engine.abort(request.request_id)  # nobody waits for it any more
            raise
        result = future.result()
        span.end(tokens=sum(len(completion.token_ids) for completion in result.completions))
        if result.error is not None:
            raise (ContextLengthError if result.is_too_long else RolloutError)(result.error)
        return result.completions

    def end_episode(self, episode: int) -> None:
        """See `Generate`."""
        if episode in self._turns:
            self._engine.close_episode(self._episode_id(episode))

    def close(self) -> None:
        """End the episodes: a commit waits for them no longer."""
        for episode in self._turns:
            self.end_episode(episode)

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
        return f"lease-{self._lease.lease_id}-{episode}"
