"""Test that a prompt is delivered exactly once, whichever producer dies."""

import pytest

from coati_rl.coordinator.leases import LeaseTable, OpenLease, SamplingPlan
from coati_rl.types import SamplingParams


@pytest.fixture
def book(make_prompts):
    """A book, and a draw of four training prompts."""
    plans = {
        "train": SamplingPlan(group_size=8, sampling=SamplingParams(temperature=0.7)),
        "eval": SamplingPlan(group_size=1, sampling=SamplingParams(temperature=0.0)),
    }
    prompts = iter(make_prompts(4))
    return LeaseTable(plans, seed=1), lambda: next(prompts, None)


def test_a_lease_says_how_its_purpose_is_sampled(book, make_prompts):
    leases, draw = book
    lease = leases.issue(0, draw)
    assert (lease.group_size, lease.sampling.temperature) == (8, 0.7)
    evaluation = leases.issue(0, iter(make_prompts(1, name="math")).__next__)
    assert (evaluation.group_size, evaluation.sampling.temperature) == (1, 0.0)


def test_a_lease_is_settled_once_and_only_by_its_holder(book):
    leases, draw = book
    lease = leases.issue(0, draw)
    assert leases.close(lease.lease_id, 1) is None
    assert leases.close(lease.lease_id, 0) == OpenLease(lease=lease, producer_id=0, sync_index=0)
    assert leases.close(lease.lease_id, 0) is None
    assert leases.close(99, 0) is None


def test_revoked_prompts_come_first_in_their_old_order_under_new_leases(book):
    leases, draw = book
    lost = [leases.issue(0, draw), leases.issue(0, draw)]
    kept = leases.issue(1, draw)
    assert leases.revoke(0) == 2
    again = [leases.issue(1, draw) for _ in range(3)]
    assert [lease.prompt.uid for lease in again] == ["train-0", "train-1", "train-3"]
    assert {lease.lease_id for lease in again}.isdisjoint({lease.lease_id for lease in [*lost, kept]})
    assert leases.close(lost[0].lease_id, 0) is None, "what arrives under the void lease is refused"


def test_a_prompt_issued_again_is_sampled_with_the_same_seed(book):
    leases, draw = book
    lost = leases.issue(0, draw)
    other = leases.issue(1, draw)
    leases.revoke(0)
    assert leases.issue(1, draw).sampling.seed == lost.sampling.seed != other.sampling.seed


def test_a_seed_is_a_function_of_run_and_prompt_that_leaves_room_for_samples(make_prompts):
    plans = {"train": SamplingPlan(group_size=1, sampling=SamplingParams())}
    seeds = [LeaseTable(plans, seed=s).issue(0, lambda: make_prompts(1)[0]).sampling.seed for s in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(0 <= seed < 2**48 for seed in seeds)


def test_a_prompt_stays_open_while_it_waits_to_be_issued_again(book):
    leases, draw = book
    lease = leases.issue(0, draw)
    assert (leases.num_open("train"), leases.has_lost) == (1, False)
    leases.revoke(0)
    assert (leases.num_open("train"), leases.has_lost) == (1, True)
    lease = leases.issue(1, draw)
    leases.close(lease.lease_id, 1)
    assert (leases.num_open("train"), leases.has_lost) == (0, False)


def test_open_prompts_are_known_by_uid_and_purpose(book, make_prompts):
    leases, draw = book
    leases.issue(0, draw), leases.issue(1, draw)
    leases.issue(1, iter(make_prompts(1, name="math")).__next__)
    leases.revoke(0)
    assert sorted(leases.uids("train")) == ["train-0", "train-1"]
    assert leases.uids("eval") == ["math-0"]


def test_what_a_producer_has_held_since_a_sync_are_its_training_leases_from_then_or_before(book, make_prompts):
    leases, draw = book
    old, at, new = (leases.issue(0, draw, sync_index=index).lease_id for index in (1, 2, 3))
    other = leases.issue(1, draw, sync_index=1).lease_id
    leases.issue(0, iter(make_prompts(1, name="math")).__next__, sync_index=1)
    assert leases.held_since(0, 2) == (old, at)
    assert leases.held_since(0, 3) == (old, at, new)
    assert leases.held_since(1, 2) == (other,)
    assert leases.held_since(0, 0) == ()


def test_there_is_no_lease_without_a_prompt(book):
    leases, _ = book
    assert leases.issue(0, lambda: None) is None


@pytest.mark.parametrize(("sync_index", "lease_id"), [(4, 0), (5, 2)])
def test_what_a_producer_gives_back_is_issued_again_with_its_number_until_the_next_sync(book, sync_index, lease_id):
    leases, draw = book
    given, kept = (leases.issue(0, draw, sync_index=4) for _ in range(2))
    assert leases.give_back(0, but=[kept.lease_id, 7]) == (7,), "which it does not know"
    again = leases.issue(1, draw, sync_index=sync_index)
    assert (again.prompt, again.lease_id) == (given.prompt, lease_id)
    assert leases.close(given.lease_id, 0) is None and leases.close(kept.lease_id, 0) is not None


def test_a_table_that_takes_over_has_the_same_leases_and_gives_the_next_number(book):
    leases, draw = book
    held = [leases.issue(producer, draw, sync_index=producer) for producer in (0, 1)]
    lost = leases.issue(2, draw)
    leases.revoke(2)
    another = LeaseTable(leases._plans, seed=1)
    another.restore(leases.kept("train"), producers=(0, 1))
    assert another.num_open("train") == leases.num_open("train") == 3
    assert another.issue(1, draw).prompt == lost.prompt
    assert [another.close(lease.lease_id, producer) for producer, lease in enumerate(held)] == [
        OpenLease(lease=lease, producer_id=producer, sync_index=producer) for producer, lease in enumerate(held)
    ]
    assert another.issue(0, draw).lease_id == 4
