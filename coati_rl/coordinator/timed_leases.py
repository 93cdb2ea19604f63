"""A lease book that keeps time: leases as they are issued and closed -> how idle producers were. A producer has
something to generate, or to score, exactly as long as it holds a lease, so that nobody has to ask it.
"""

from collections.abc import Callable

from coati_rl.coordinator.leases import LeaseTable, OpenLease, SamplingPlan
from coati_rl.observability.idle import ProducerIdleFraction
from coati_rl.types import Lease, Prompt, Purpose


class TimedLeaseTable(LeaseTable):
    """See `LeaseTable`; a producer counts from `producer_idle.join` until its leases are revoked."""

    def __init__(self, plans: dict[Purpose, SamplingPlan], *, seed: int) -> None:
        super().__init__(plans, seed=seed)
        self.producer_idle = ProducerIdleFraction()

    def issue(self, producer_id: int, draw: Callable[[], Prompt | None], *, sync_index: int = 0) -> Lease | None:
        """See LeaseTable."""
        lease = super().issue(producer_id, draw, sync_index=sync_index)
        self.producer_idle.change(producer_id, 0 if lease is None else 1)
        return lease

    def settle(self, lease_id: int, producer_id: int) -> OpenLease | None:
        """See LeaseTable."""
        settled = super().settle(lease_id, producer_id)
        self.producer_idle.change(producer_id, 0 if settled is None else -1)
        return settled

    def revoke(self, producer_id: int) -> int:
        """See LeaseTable."""
        self.producer_idle.leave(producer_id)
        return super().revoke(producer_id)
