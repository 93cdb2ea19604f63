"""Test that a producer loses nothing to a coordinator that dies, and drops what another one does not know."""

import asyncio
from dataclasses import replace

from coati_rl.errors import CoordinatorReplacedError
from coati_rl.observability.timeline import NO_TIMELINE
from producer.environments.environment import Rollout
from producer.environments.single_turn import SingleTurn, single_turns
from producer.group_runner import GroupRunner
from tests.unit.producer.test_rollout_loop import Coordinator, Engine, lease, roll_out

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


def runner_of(engine, environment=None):
    environment = environment or SingleTurn()
    return GroupRunner(engine, environment, max_sequences=20, group_size=2, timeline=NO_TIMELINE)


def turn(runner, times=1):
    """Let the groups run, without taking those that are done."""
    for _ in range(times):
        runner._loop.run_until_complete(asyncio.sleep(0))


def test_a_lease_that_is_issued_again_while_its_first_group_still_ends_is_sampled_once():
    """Episodes end as a group's do: cancelled, and waited for."""

    class Episodes:
        async def run(self, prompt, generate, *, group_size):
            tasks = [asyncio.ensure_future(generate(prompt.token_ids)) for _ in range(group_size)]
            try:
                answered = await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
            return Rollout(trajectories=single_turns(prompt, [part for (part,) in answered], temperature=0.7))

    engine = Engine()
    runner = runner_of(engine, Episodes())
    runner.submit([lease(7)], min_policy_version=4)
    turn(runner, 3)
    runner.drop({7})
    assert runner.lease_ids == [], "it is not held any more"
    runner.submit([lease(7)], min_policy_version=4)
    assert runner.lease_ids == [7]
    taken = []
    for _ in range(6):
        turn(runner, 3)
        engine.answer_one()
        taken += runner.take_finished(0.05)
    assert [(done.lease.lease_id, done.error, len(done.trajectories)) for done in taken] == [(7, None, 2)]
    assert runner.is_drained
    runner.close()


def test_a_group_that_is_done_when_its_lease_becomes_void_is_not_handed_out_for_the_prompt_that_gets_its_id():
    engine = Engine()
    runner = runner_of(engine)
    runner.submit([lease(7)], min_policy_version=4)
    engine.answer_one()
    turn(runner, 3)
    runner.drop({7})
    other = lease(8)
    runner.submit([replace(other, lease_id=7)], min_policy_version=4)
    assert runner.take_finished(0.05) == []
    engine.answer_one()
    turn(runner, 3)
    (done,) = runner.take_finished(0.05)
    assert (done.lease.prompt.uid, done.trajectories[0].token_ids.tolist()) == ("p8", [1, 8, 7, 8])
    assert runner.is_drained
    runner.close()
