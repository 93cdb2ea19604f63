"""Test that time in which the process did not run is not counted."""

from coati_rl.observability.running_clock import MAX_GAP_S, RunningClock


def test_time_between_readings_counts():
    times = iter([10.0, 10.5, 11.5])
    clock = RunningClock(lambda: next(times))
    assert (clock.read(), clock.read()) == (0.5, 1.5)


def test_a_stop_of_75_seconds_counts_as_one_gap():
    times = iter([0.0, 1.0, 76.0, 77.0])
    clock = RunningClock(lambda: next(times))
    assert [clock.read() for _ in range(3)] == [1.0, 1.0 + MAX_GAP_S, 2.0 + MAX_GAP_S]


def test_a_restart_counts_from_then_on():
    times = iter([0.0, 1.0, 1.5, 3.0])
    clock = RunningClock(lambda: next(times))
    clock.read()
    clock.restart()
    assert clock.read() == 1.5
