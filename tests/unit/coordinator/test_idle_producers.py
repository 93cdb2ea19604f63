"""Test that a producer without a lease is idle."""

import pytest

from coati_rl.coordinator.leases import LeaseTable, SamplingPlan
from coati_rl.observability.idle import ProducerIdleFraction
from coati_rl.types import SamplingParams


class Clock:
    """Time that a test sets."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def book(make_prompts):
    """A book with producer 0 in the run, a draw of two prompts, its clock."""
    plans = {"train": SamplingPlan(group_size=8, sampling=SamplingParams(temperature=0.7))}
    prompts, clock = iter(make_prompts(2)), Clock()
    leases = LeaseTable(plans, seed=1)
    leases.producer_idle = ProducerIdleFraction(clock)
    leases.producer_idle.join(0)
    return leases, lambda: next(prompts, None), clock


def test_a_producer_is_busy_from_its_first_lease_to_its_last(book):
    leases, draw, clock = book
    clock.now = 101.0  # 1 s idle
    first, second = leases.issue(0, draw), leases.issue(0, draw)
    assert leases.issue(0, draw) is None
    clock.now = 102.0
    leases.close(first.lease_id, 0)
    assert leases.close(first.lease_id, 0) is None, "a lease that is closed twice counts once"
    clock.now = 105.0
    leases.close(second.lease_id, 0)
    clock.now = 108.0  # 3 s idle
    assert leases.producer_idle.take() == 0.5


def test_a_producer_whose_leases_are_revoked_is_gone(book):
    leases, draw, clock = book
    lease = leases.issue(0, draw)
    clock.now = 102.0
    assert leases.revoke(0) == 1
    assert leases.close(lease.lease_id, 0) is None
    clock.now = 104.0
    assert leases.producer_idle.take() == 0.0  # of the 2 s that it was there
    assert leases.producer_idle.take() is None
