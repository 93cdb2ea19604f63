"""Record who is rolling out what. A prompt is leased to one producer; when that dies the prompt is issued again
under a new lease, and whatever still arrives under the old one is refused: a prompt is delivered exactly once.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from coati_rl.types import Lease, Prompt, Purpose, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """Describe how prompts of one purpose are sampled."""

    group_size: int
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLease:
    """A lease, whose it is, and how old its first token may be."""

    lease: Lease
    producer_id: int
    sync_index: int  # of the weights that the producer serves, or older than these


class LeaseTable:
    """Open leases, and prompts waiting to be issued again."""

    def __init__(self, plans: dict[Purpose, SamplingPlan], *, seed: int) -> None:
        self._plans = plans
        self._seed = seed
        self._open: dict[int, OpenLease] = {}
        self._again: deque[Prompt] = deque()
        self._num_open: Counter[Purpose] = Counter()
        self._next_id = 0

    def issue(self, producer_id: int, draw: Callable[[], Prompt | None], *, sync_index: int = 0) -> Lease | None:
        """Lease a lost prompt again, else the next one of `draw`; None when there is none."""
        if self._again:
            prompt: Prompt | None = self._again.popleft()
        elif prompt := draw():
            self._num_open[prompt.purpose] += 1
        if prompt is None:
            return None
        plan = self._plans[prompt.purpose]
        sampling = replace(plan.sampling, seed=self._request_seed(prompt.uid))
        lease = Lease(lease_id=self._next_id, prompt=prompt, group_size=plan.group_size, sampling=sampling)
        self._open[lease.lease_id] = OpenLease(lease=lease, producer_id=producer_id, sync_index=sync_index)
        self._next_id += 1
        return lease

    def settle(self, lease_id: int, producer_id: int) -> OpenLease | None:
        """Close a lease; None if it is not this producer's any more."""
        settled = self._open.get(lease_id)
        if settled is None or settled.producer_id != producer_id:
            return None
        del self._open[lease_id]
        self._num_open[settled.lease.prompt.purpose] -= 1
        return settled

    def revoke(self, producer_id: int) -> int:
        """Take back a producer's leases, to be issued again. Returns their number."""
        lost = [lease_id for lease_id, entry in self._open.items() if entry.producer_id == producer_id]
        self._again.extend(self._open.pop(lease_id).lease.prompt for lease_id in lost)
        return len(lost)

    def num_open(self, purpose: Purpose) -> int:
        """Prompts of a purpose with a producer or waiting to be issued again."""
        return self._num_open[purpose]

    def sync_indices(self, purpose: Purpose) -> list[int]:
        """Of the leases of a purpose that are with a producer."""
        return [entry.sync_index for entry in self._open.values() if entry.lease.prompt.purpose == purpose]

    def uids(self, purpose: Purpose) -> list[str]:
        """Of the prompts that `num_open` counts."""
        prompts = [*(entry.lease.prompt for entry in self._open.values()), *self._again]
        return [prompt.uid for prompt in prompts if prompt.purpose == purpose]

    def num_lost(self, purpose: Purpose) -> int:
        """Return how many prompts of a purpose wait to be issued again."""
        return sum(prompt.purpose == purpose for prompt in self._again)

    def holders(self, purpose: Purpose | None = None) -> set[int]:
        """Return the producers with a prompt of a purpose; None: of any."""
        entries = self._open.values()
        return {entry.producer_id for entry in entries if purpose in (None, entry.lease.prompt.purpose)}

    @property
    def has_lost(self) -> bool:
        """True while a prompt waits to be issued again."""
        return bool(self._again)

    def _request_seed(self, uid: str) -> int:
        # 48 bits: sample i uses seed + i, which stays clear of every engine's 63-bit limit.
        return int.from_bytes(hashlib.blake2b(f"{self._seed}/{uid}".encode(), digest_size=6).digest(), "big")
