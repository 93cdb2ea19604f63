"""Test the curve of a number over a whole run in a few characters."""

import math

from coati_rl.observability.sparkline import ASCII_BARS, MAX_POINTS, Curve, sparkline


def curve_of(values):
    curve = Curve()
    for value in values:
        curve.add(value)
    return curve


def test_the_smallest_point_is_the_lowest_bar_and_the_largest_the_highest():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([1.0, 0.0], ASCII_BARS) == "#_"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([1e-9, -2e-9, 9e-5], resolution=1e-4) == "▁▁▁", "rounding is no curve"
    assert sparkline([1.0]) == sparkline([]) == "", "one point is no curve"


def test_a_value_that_is_no_number_is_left_out():
    curve = curve_of([1.0, None, math.nan, math.inf, 2.0])
    assert curve.points() == [1.0, 2.0] and curve.last == 2.0
    assert curve_of([None]).last is None


def test_a_curve_is_that_of_the_whole_run_however_long():
    curve = curve_of(range(20))
    assert curve.points() == [0.5, 2.5, 4.5, 6.5, 8.5, 10.5, 12.5, 14.5, 16.5, 18.5], "means of two"
    assert curve_of(range(21)).points()[-1] == 20, "the last one of what there is"
    long = curve_of(range(100_000)).points()
    assert MAX_POINTS // 2 <= len(long) <= MAX_POINTS and long == sorted(long)
    assert sparkline(long)[0] == "▁" and sparkline(long)[-1] == "█"
