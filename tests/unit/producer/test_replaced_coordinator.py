"""Test that a producer loses nothing to a coordinator that dies, and drops what another one does not know."""

from coati_rl.errors import CoordinatorReplacedError
from tests.unit.producer.test_rollout_loop import Coordinator, lease, roll_out

__all__ = ["roll_out"]  # a fixture


class Replaced(Coordinator):
    """Is dead at some calls, and another one by the next, which issues the leases in `void` again."""

    def __init__(self, *leases, dead_at, void=()):
        super().__init__(*leases)
        self.dead_at, self.void, self.held = dead_at, void, []

    def _note(self, call):
        if call in self.dead_at:
            self.dead_at.remove(call)
            raise CoordinatorReplacedError("another coordinator has taken over")

    def lease(self, producer_id, **options):
        if len(self.asked) == 1:
            self._note("lease")
        return super().lease(producer_id, **options)

    def put(self, producer_id, groups):
        self._note("put")
        super().put(producer_id, groups)

    def fail(self, producer_id, lease_id, cause):
        self._note("fail")
        super().fail(producer_id, lease_id, cause)

    def rejoin(self, producer_id, held):
        self.held.append([*held])
        self.leases = [self.given[number] for number in self.void] + self.leases
        return tuple(self.void)


def test_what_a_dead_coordinator_did_not_take_goes_to_the_one_that_has_taken_over(roll_out):
    coordinator = Replaced(*map(lease, range(4)), dead_at=["lease", "put", "fail"])
    roll_out(coordinator=coordinator, max_sequences=8, refuses=("lease-1",))
    assert coordinator.held == [[1, 2, 3, 0], [1, 2, 3, 0], [2, 3, 1]], "being sampled, then scored or failed"
    assert [group.lease_id for group in coordinator.groups] == [0, 2, 3]
    assert coordinator.failures == [(3, 1, "too long")]


def test_requests_of_leases_that_it_does_not_know_are_ended_and_have_other_names_when_they_are_issued_again(roll_out):
    coordinator = Replaced(*map(lease, range(3)), dead_at=["lease"], void=[1, 2])
    coordinator, engine = roll_out(coordinator=coordinator, max_sequences=6)
    assert engine.aborted == ["lease-1", "lease-2"]
    assert [request.request_id for request in engine.requests[3:]] == ["lease-1.1", "lease-2.1"]
    assert sorted(group.lease_id for group in coordinator.groups) == [0, 1, 2]
