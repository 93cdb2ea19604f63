"""Test the numbered events that the driver acknowledges."""

from coati_rl.coordinator.event_log import EventLog


def test_a_late_call_discards_nothing_that_was_not_received():
    log = EventLog()
    for kind in ("a", "b", "c"):
        log.add(kind, {})
    log.acknowledge(1)
    assert [event["event"] for event in log.unacknowledged()] == ["b", "c"]
    log.acknowledge(0)  # of a call that was sent before
    assert [event["event"] for event in log.unacknowledged()] == ["b", "c"]
    log.acknowledge(3)
    assert log.unacknowledged() == []
