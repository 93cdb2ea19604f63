"""Record which producer rolls out which prompt, so that each prompt is delivered exactly once.

A prompt is leased to one producer; if that dies, the prompt is issued again under a new lease, and results under the
old one are refused. A producer generates or scores exactly as long as it holds a lease: its idle time needs no report.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coati_rl.observability.idle import ProducerIdleFraction
from coati_rl.types import Lease, Prompt, Purpose, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """Describe how prompts of one purpose are sampled."""

    group_size: int
    sampling: SamplingParams
    of_tasks: Mapping[str, SamplingParams] = field(default_factory=dict)  # that are sampled in another way
    has_baseline: bool = False  # see `Lease`

    def sampling_of(self, task: str) -> SamplingParams:
        """Return how prompts of a task are sampled."""
        return self.of_tasks.get(task, self.sampling)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLease:
    """Hold a lease, its producer, and the sync that bounds the age of its first token."""

    lease: Lease
    producer_id: int
    sync_index: int  # of the weights that the producer serves, or older than these


class LeaseTable:
    """Hold open leases, and prompts waiting to be issued again.

    `producer_idle` counts a producer from its `join` until its leases are revoked.
    """

    def __init__(
        self, plans: dict[Purpose, SamplingPlan], *, seed: int, former_ids: Mapping[str, int] | None = None
    ) -> None:
        """Begin without leases.

        Args:
            plans: how prompts are sampled, by purpose.
            seed: of the run.
            former_ids: of prompts leased before the run was resumed, by uid: 0, 1, ...; a prompt gets its own again,
                so that groups keep their order.
        """
        self._plans = plans
        self._former_ids = dict(former_ids or {})
        self._returned: dict[str, tuple[int, int]] = {}  # uid -> lease and sync of a prompt that is issued again
        self._seed = seed
        self._open: dict[int, OpenLease] = {}
        self._again: deque[Prompt] = deque()
        self._num_open: Counter[Purpose] = Counter()
        self._num_held: Counter[tuple[Purpose, int]] = Counter()  # open leases, by purpose and producer
        self._next_id = len(self._former_ids)
        self.producer_idle = ProducerIdleFraction()

    def issue(self, producer_id: int, draw: Callable[[], Prompt | None], *, sync_index: int = 0) -> Lease | None:
        """Lease a lost prompt again, else the next one of `draw`; None when there is none."""
        if self._again:
            prompt: Prompt | None = self._again.popleft()
        elif prompt := draw():
            self._num_open[prompt.purpose] += 1
        if prompt is None:
            return None
        lease_id, sync_before = self._returned.pop(prompt.uid, (self._next_id, sync_index))
        if sync_before != sync_index:  # groups are trained in the order of leases, which is that of syncs
            lease_id = self._next_id
        lease_id = self._former_ids.pop(prompt.uid, lease_id)
        plan = self._plans[prompt.purpose]
        sampling = replace(plan.sampling_of(prompt.task), seed=self._request_seed(prompt.uid))
        lease = Lease(
            lease_id=lease_id,
            prompt=prompt,
            group_size=plan.group_size,
            sampling=sampling,
            has_baseline=plan.has_baseline,
        )
        self._open[lease.lease_id] = OpenLease(lease=lease, producer_id=producer_id, sync_index=sync_index)
        self._num_held[prompt.purpose, producer_id] += 1
        self._next_id += lease_id == self._next_id
        self.producer_idle.change(producer_id, 1)
        return lease

    def close(self, lease_id: int, producer_id: int) -> OpenLease | None:
        """Close and return a lease; None if it is no longer this producer's."""
        closed = self._open.get(lease_id)
        if closed is None or closed.producer_id != producer_id:
            return None
        self._take(lease_id)
        self._num_open[closed.lease.prompt.purpose] -= 1
        self.producer_idle.change(producer_id, -1)
        return closed

    def revoke(self, producer_id: int) -> int:
        """Take back a producer's leases, to be issued again. Returns: their number."""
        self.producer_idle.leave(producer_id)
        lost = [lease_id for lease_id, entry in self._open.items() if entry.producer_id == producer_id]
        self._again.extend(self._take(lease_id).lease.prompt for lease_id in lost)
        return len(lost)

    def give_back(self, producer_id: int, *, but: Collection[int]) -> tuple[int, ...]:
        """Take back the leases that a producer does not hold any more: before the next sync each keeps its id.

        Args:
            producer_id: of the producer.
            but: ids of the leases that it holds.
        Returns: those of them that are not its own.
        """
        own = {lease_id for lease_id, entry in self._open.items() if entry.producer_id == producer_id}
        for lease_id in sorted(own.difference(but)):
            entry = self._take(lease_id)
            self._again.append(entry.lease.prompt)
            self._returned[entry.lease.prompt.uid] = (lease_id, entry.sync_index)
            self.producer_idle.change(producer_id, -1)
        return tuple(lease_id for lease_id in but if lease_id not in own)

    def kept(self, purpose: Purpose) -> dict[str, Any]:
        """Return the leases of a purpose, for `restore`."""
        open_leases = [
            (lease_id, entry.lease.prompt, entry.producer_id, entry.sync_index)
            for lease_id, entry in self._open.items()
            if entry.lease.prompt.purpose == purpose
        ]
        again = [prompt for prompt in self._again if prompt.purpose == purpose]
        ids = {"former_ids": self._former_ids, "returned": self._returned, "next_id": self._next_id}
        return {"open": open_leases, "again": again, **ids}

    def restore(self, values: Mapping[str, Any], producers: Iterable[int]) -> None:
        """Restore the leases that another table has kept; `producers` are those that work."""
        self._next_id, self._former_ids = values["next_id"], values["former_ids"]
        for producer_id in producers:
            self.producer_idle.join(producer_id)
        for lease_id, prompt, producer_id, sync_index in values["open"]:
            self._again.append(prompt)
            self._returned[prompt.uid] = (lease_id, sync_index)
            self.issue(producer_id, lambda: None, sync_index=sync_index)
        self._returned = values["returned"]
        self._again.extend(values["again"])
        self._num_open.update(prompt.purpose for prompt in (*self._again, *(each[1] for each in values["open"])))

    def num_open(self, purpose: Purpose) -> int:
        """Return the number of prompts of a purpose that are leased or wait to be issued again."""
        return self._num_open[purpose]

    def sync_indices(self, purpose: Purpose) -> list[int]:
        """Return the sync indices of the open leases of a purpose."""
        return [entry.sync_index for entry in self._open.values() if entry.lease.prompt.purpose == purpose]

    def held_since(self, producer_id: int, sync_index: int) -> tuple[int, ...]:
        """Return the training leases of a producer from after this sync, or an earlier one, by id."""
        return tuple(
            lease_id
            for lease_id, entry in self._open.items()
            if entry.producer_id == producer_id
            and entry.sync_index <= sync_index
            and entry.lease.prompt.purpose == "train"
        )

    def open_ids(self, purpose: Purpose) -> dict[str, int]:
        """Return the leases of the prompts of a purpose that are being sampled, by uid."""
        leases = [entry.lease for entry in self._open.values() if entry.lease.prompt.purpose == purpose]
        return {lease.prompt.uid: lease.lease_id for lease in leases}

    def uids(self, purpose: Purpose) -> list[str]:
        """Return the uids of the prompts that `num_open` counts."""
        prompts = [*(entry.lease.prompt for entry in self._open.values()), *self._again]
        return [prompt.uid for prompt in prompts if prompt.purpose == purpose]

    def num_lost(self, purpose: Purpose) -> int:
        """Return the number of prompts of a purpose that wait to be issued again."""
        return sum(prompt.purpose == purpose for prompt in self._again)

    def holders(self, purpose: Purpose | None = None) -> set[int]:
        """Return the producers with a prompt of a purpose; None: of any."""
        return {producer for held_for, producer in self._num_held if purpose in (None, held_for)}

    @property
    def has_lost(self) -> bool:
        """Return True while a prompt waits to be issued again."""
        return bool(self._again)

    def _take(self, lease_id: int) -> OpenLease:
        """Remove an open lease."""
        entry = self._open.pop(lease_id)
        key = entry.lease.prompt.purpose, entry.producer_id
        self._num_held[key] -= 1
        if not self._num_held[key]:
            del self._num_held[key]
        return entry

    def _request_seed(self, uid: str) -> int:
        # 48 bits: sample i uses seed + i, which must not exceed an engine's limit of 63 bits.
        return int.from_bytes(hashlib.blake2b(f"{self._seed}/{uid}".encode(), digest_size=6).digest(), "big")
