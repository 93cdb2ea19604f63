"""Test the columns of steps, how they are thinned, and the points of evaluations."""

import math

import pytest

from coati_rl.report.curves import Curves, evaluation_points, rounded


def curves_of(records, **settings):
    curves = Curves(**settings)
    for number, record in enumerate(records, 1):
        curves.add({"step": number} | record)
    return curves


def test_few_steps_are_kept_as_they_are_and_a_missing_value_is_null():
    curves = curves_of([{"loss": 1.0}, {"loss": None, "kl": 2.0}, {"loss": 3.0}])
    assert curves.thinned(10)["loss"] == {"mean": [1, None, 3]}
    assert curves.thinned(10)["kl"] == {"mean": [None, 2, None]}
    assert curves.thinned(10)["step"] == {"mean": [1, 2, 3]}


def test_a_bucket_has_the_mean_the_least_and_the_largest_value_so_that_no_peak_is_lost():
    curves = curves_of([{"loss": value} for value in (1.0, 3.0, 5.0, 107.0)])
    assert curves.thinned(2)["loss"] == {"mean": [2, 56], "min": [1, 5], "max": [3, 107]}
    assert curves.thinned(2)["step"] == {"mean": [2, 4]}, "a bucket is at its last step"


def test_samples_are_those_that_came_in_whichever_the_job():
    rl = curves_of([{"groups_total": 2}, {"groups_total": 3}], group_size=4)
    assert rl.thinned(10)["samples"] == {"mean": [8, 20]}
    assert curves_of([{"num_samples": 32}, {"num_samples": 16}]).thinned(10)["samples"] == {"mean": [32, 48]}


def test_tokens_of_each_second_and_totals():
    curves = curves_of([{"num_response_tokens": 10, "step_s": 2.0}, {"num_response_tokens": 30, "step_s": 3.0}])
    assert curves.thinned(10)["tokens_per_s"] == {"mean": [5, 10]}
    assert curves.sums() == {"step_s": 5, "num_response_tokens": 40}


def test_figures_without_a_value_are_not_there_and_those_that_never_change_are_named():
    curves = curves_of([{"loss": 1.0, "kl_mean": None, "clip": 0.0}, {"loss": 2.0, "kl_mean": None, "clip": 0.0}])
    assert {"loss", "clip", "step", "samples"} == set(curves.figures())
    assert curves.constants() == {"clip": 0, "samples": 0}


@pytest.mark.parametrize(
    ("value", "shown"), [(0.123456789, 0.12346), (1e-9, 1e-9), (512.0, 512), (math.nan, None), (None, None)]
)
def test_numbers_have_as_many_digits_as_a_chart_shows(value, shown):
    assert rounded(value) == shown


def test_evaluations_are_points_by_the_names_that_charts_have():
    found = evaluation_points(
        [{"step": 10, "task": "math", "accuracy": 0.5, "num_prompts": 9}, {"step": 0, "task": "math", "accuracy": 0.25}]
    )
    assert found == {"eval/math/accuracy": [(0, 0.25), (10, 0.5)]}
