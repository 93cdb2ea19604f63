"""Who holds which weights, and how stale a version is, counted in weight syncs."""

from coati_rl.data.membership import Membership


def members_at(version, *producers):
    members = Membership()
    for producer in producers:
        members.add(producer)
    if version:
        members.committed(producers, version)
        members.complete_sync(version)
    return members


def test_a_sync_is_due_every_period_and_once_more_for_the_last_weights():
    members = members_at(0, 0)
    assert [members.is_sync_due(step, 4, is_over=False) for step in (0, 3, 4, 5)] == [False, False, True, True]
    assert [members.is_sync_due(step, 4, is_over=True) for step in (0, 1)] == [False, True]


def test_staleness_counts_completed_syncs():
    members = members_at(0, 0)
    assert members.staleness(0) == 0
    for version in (4, 8):
        members.committed([0], version)
        members.complete_sync(version)
    assert [members.staleness(version) for version in (0, 4, 8)] == [2, 1, 0]


def test_a_producer_that_joins_holds_the_start_weights_and_waits():
    members = members_at(4, 0)
    members.add(1)
    assert members.stale(4) == (1,)
    assert (members.is_current(0), members.is_current(1)) == (True, False)
    members.committed([1], 6)  # between two syncs: two optimizer steps fresher than the last one
    assert members.is_current(1) and members.stale(4) == ()
    assert members.staleness(6) == 0


def test_a_producer_is_removed_once():
    members = members_at(0, 0, 1)
    assert members.remove(0) and not members.remove(0)
    assert members.ids == (1,)
    members.committed([0], 4)
    assert members.ids == (1,), "a late word about a producer that is gone changes nothing"
