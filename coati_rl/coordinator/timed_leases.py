"""Measure how long producers are idle from the leases that they hold.

A producer generates or scores exactly as long as it holds a lease, so that it need not report its idle time.
"""

from collections.abc import Callable

from coati_rl.coordinator.leases import LeaseTable, OpenLease, SamplingPlan
from coati_rl.observability.idle import ProducerIdleFraction
from coati_rl.types import Lease, Prompt, Purpose


class TimedLeaseTable(LeaseTable):
    """Extend `LeaseTable`; a producer counts from `producer_idle.join` until its leases are revoked."""

    def __init__(self, plans: dict[Purpose, SamplingPlan], *, seed: int) -> None:
        super().__init__(plans, seed=seed)
        self.producer_idle = ProducerIdleFraction()

    def issue(self, producer_id: int, draw: Callable[[], Prompt | None], *, sync_index: int = 0) -> Lease | None:
        """See LeaseTable."""
        lease = super().issue(producer_id, draw, sync_index=sync_index)
        self.producer_idle.change(producer_id, 0 if lease is None else 1)
        return lease

    def close(self, lease_id: int, producer_id: int) -> OpenLease | None:
        """See LeaseTable."""
        closed = super().close(lease_id, producer_id)
        self.producer_idle.change(producer_id, 0 if closed is None else -1)
        return closed

    def revoke(self, producer_id: int) -> int:
        """See LeaseTable."""
        self.producer_idle.leave(producer_id)
        return super().revoke(producer_id)
