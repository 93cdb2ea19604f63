"""Test how the times of steps are read from driver.log."""

import time
from itertools import pairwise

import pytest

from coati_rl.doctor.driver_log import read_driver_log

# Central European Summer Time ended in 2026 on 25 October at 3:00, which was 2:00 again.
LINES = ("2026-10-25 02:59:30,000", "2026-10-25 02:00:10,000", "2026-10-25 02:00:50,000", "2026-10-25 03:00:10,000")


@pytest.fixture
def in_central_europe(monkeypatch):
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_the_hour_that_comes_twice_at_the_end_of_daylight_saving_time_is_no_jump_of_the_clock(
    in_central_europe, tmp_path
):
    log = tmp_path / "driver.log"
    log.write_text("".join(f"{at} INFO coati_rl.run: step {n}/9  loss 1\n" for n, at in enumerate(LINES, start=1)))
    times = [seconds for _, seconds in read_driver_log(log).step_times]
    assert [later - before for before, later in pairwise(times)] == [40.0, 40.0, 3560.0]
