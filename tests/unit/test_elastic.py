"""Test what the measurement of producers that join and leave says of a run."""

import pytest
from elastic import Run


def test_groups_a_second_are_those_between_two_steps_and_producers_are_weighed_by_their_time():
    run = Run.__new__(Run)
    run.steps, run.presence = [0.0, 10.0, 20.0, 30.0], [(0.0, 1), (15.0, 3), (25.0, 2)]
    assert run.rate(0, 1) == (0.8, 1.0)
    assert run.rate(1, 3) == (0.8, pytest.approx((5 * 1 + 10 * 3 + 5 * 2) / 20))
