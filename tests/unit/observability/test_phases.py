"""Test what a process does now: phases by thread, how long, how long before, and at which line."""

import gc
import sys
import threading

import pytest

from coati_rl.observability.phases import Phases


class Clock:
    """A monotonic clock that a test moves, a second at a time so that nothing looks like a stop."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def run(self, phases, seconds):
        for _ in range(seconds):
            self.now += 1.0
            phases.report()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def phases(clock):
    return Phases(clock)


def test_nested_phases_are_reported_with_their_path_and_time(phases, clock):
    phases.begin("train", item=4, step=7)
    clock.run(phases, 3)
    with phases.phase("forward_backward"):
        clock.run(phases, 2)
        outer, inner = phases.report()
    assert (outer.name, outer.path, outer.item, outer.seconds) == ("train", "train (step 7)", 4, 5.0)
    assert (inner.path, inner.item, inner.seconds) == ("train (step 7) > forward_backward", 4, 2.0)
    assert [phase.name for phase in phases.report()] == ["train"]


def test_a_phase_knows_the_median_of_those_before_it(phases, clock):
    for seconds in (1, 9, 2):
        with phases.phase("step"):
            clock.run(phases, seconds)
    phases.begin("step")
    assert phases.report()[0].median_s == 2.0
    phases.begin("save")
    assert phases.report()[1].median_s is None


def test_a_stop_of_the_process_is_not_time_in_a_phase(phases, clock):
    phases.begin("step")
    clock.run(phases, 3)
    clock.now += 75.0
    assert phases.report()[0].seconds == 3.0 + 2.0


def test_a_phase_of_another_thread_does_not_nest_and_says_at_which_line_it_is(phases, clock):
    phases.begin("train")
    is_over, has_begun = threading.Event(), threading.Event()

    def work():
        with phases.phase("engine step"):
            has_begun.set()
            is_over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    has_begun.wait()
    clock.run(phases, 3)
    try:
        step = phases.report()[1]
        assert step.path == "engine step"
        assert step.where.startswith("test_phases.py:") and step.where.endswith(" in work")
    finally:
        is_over.set()
        thread.join()


def test_a_phase_that_raises_is_over(phases):
    with pytest.raises(ValueError, match="seen"), phases.phase("step"):
        raise ValueError("seen")
    assert phases.report() == ()


def test_no_garbage_is_collected_while_frames_are_read_since_that_may_deadlock(phases, monkeypatch):
    seen, frames = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or frames())
    for is_enabled in (True, False):
        (gc.enable if is_enabled else gc.disable)()
        try:
            phases.report()
            assert gc.isenabled() is is_enabled
        finally:
            gc.enable()
    assert seen == [False, False]
