"""Test who holds which weights, and how stale a version is, counted in weight syncs."""

import pytest

from coati_rl.coordinator.membership import UNSYNCED, Membership


def members_at(version, *producers):
    members = Membership()
    for producer in producers:
        members.add(producer, 0)
    if version:
        members.staged(producers, version)
        members.complete_sync(version)
        for producer in producers:
            members.committed(producer)
    return members


def test_a_sync_is_due_every_period_and_once_more_for_the_last_weights():
    members = members_at(0, 0)
    assert [members.is_sync_due(step, 4, is_over=False) for step in (0, 3, 4, 5)] == [False, False, True, True]
    assert [members.is_sync_due(step, 4, is_over=True) for step in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    ("start", "due"),
    [(2, [4, 5, 6, 7, 8]), (4, [8]), (5, [8])],  # between two syncs; at one; at the early last one of a shorter run
)
def test_a_resumed_run_syncs_when_the_uninterrupted_one_would(start, due):
    members = Membership(start_version=start)
    assert [step for step in range(start, 9) if members.is_sync_due(step, 4, is_over=False)] == due


def test_a_resumed_run_serves_the_checkpoints_weights_which_producers_get_when_they_join():
    members = Membership(start_version=6)
    members.add(0, UNSYNCED)
    assert (members.published_version, members.is_current(0), members.stale(6)) == (6, False, (0,))
    members.staged([0], 6)
    assert not members.is_current(0), "what is staged does not serve yet"
    assert members.is_current(0, is_drained=True), "unless nothing has to end before it does"
    members.committed(0)
    assert members.is_current(0) and members.staleness(6) == 0


def test_staleness_counts_completed_syncs():
    members = members_at(0, 0)
    assert members.staleness(0) == 0
    for version in (4, 8):
        members.staged([0], version)
        members.complete_sync(version)
    assert [members.staleness(version) for version in (0, 4, 8)] == [2, 1, 0]


def test_a_producer_that_joins_holds_the_start_weights_and_waits():
    members = members_at(4, 0)
    members.add(1, UNSYNCED)
    assert members.stale(4) == (1,)
    assert (members.is_current(0), members.is_current(1)) == (True, False)
    members.staged([1], 6)  # between two syncs: two optimizer steps fresher than the last one
    members.committed(1)
    assert members.is_current(1) and members.stale(4) == ()
    assert members.staleness(6) == 0


def test_a_producer_is_removed_once():
    members = members_at(0, 0, 1)
    assert members.remove(0) and not members.remove(0)
    assert members.ids == (1,)
    members.staged([0], 4)
    assert members.ids == (1,), "a late word about a producer that is gone changes nothing"


def test_versions_that_no_rollout_can_have_any_more_are_forgotten():
    members = members_at(0, 0)
    for version in range(1, 1001):
        members.staged([0], version)
        members.complete_sync(version)
    assert members.staleness(1000) == 0 and members.staleness(900) == 100
    assert len(members.sync_index_of) == 101
