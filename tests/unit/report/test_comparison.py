"""Test the summary of a run, the comparison of several at equal places, and which differ in the seed alone."""

from coati_rl.report.charts import charts_of
from coati_rl.report.comparison import at_equal, different_settings, seed_groups, summary_rows
from coati_rl.report.curves import Curves


def curves_of(values, key="reward_mean", groups=1, group_size=1):
    curves = Curves(group_size)
    for step, value in enumerate(values, 1):
        curves.add({"step": step, key: value, "groups_total": groups})
    return curves


def test_the_summary_has_first_best_and_last_values_evaluations_first():
    rows = summary_rows(curves_of([0.1, 0.9, 0.5]), {"eval/a/accuracy": [(0, 0.2), (3, 0.1)], "eval/a/other": [(0, 1)]})
    assert rows == [
        {"name": "eval/a/accuracy", "better": "up", "first": 0.2, "best": 0.2, "best_step": 0, "last": 0.1},
        {"name": "reward_mean", "better": "up", "first": 0.1, "best": 0.9, "best_step": 2, "last": 0.5},
    ]
    assert summary_rows(curves_of([3.0, 1.0, 2.0], "loss"), {})[0]["best"] == 1


def test_the_loss_of_a_policy_gradient_and_an_accuracy_that_is_the_reward_say_nothing():
    curves = Curves()
    curves.add({"step": 1, "reward_mean": 0.5, "answer_accuracy": 0.5, "loss": 0.1})
    assert [row["name"] for row in summary_rows(curves, {})] == ["reward_mean"]


def test_runs_are_compared_at_the_last_step_that_all_have_reached_by_the_mean_of_ten_steps():
    runs = [curves_of([float(step) for step in range(1, 41)]), curves_of([1.0] * 19 + [11.0])]
    found = at_equal("step", runs, [{}, {}])
    assert found == {"axis": "step", "limit": 20, "rows": [{"name": "reward_mean", "values": [15.5, 2]}]}


def test_at_equal_samples_a_run_of_larger_steps_is_compared_at_an_earlier_one():
    small, large = curves_of([0.1] * 10 + [0.9] * 90, group_size=4), curves_of([0.2, 0.4, 0.6], group_size=80)
    points = [{"eval/a/accuracy": [(0, 0.1), (50, 0.7), (100, 0.8)]}, {"eval/a/accuracy": [(0, 0.3), (2, 0.4)]}]
    found = at_equal("samples", [small, large], points)
    assert found["limit"] == 240
    assert found["rows"][0] == {"name": "eval/a/accuracy", "values": [0.7, 0.4]}, "of steps up to 60, and up to 3"
    assert found["rows"][1] == {"name": "reward_mean", "values": [0.9, 0.4]}


def test_runs_are_one_experiment_if_seed_and_places_alone_differ():
    configs = [
        {"seed": 0, "lr": 1, "run_dir": "a"},
        {"seed": 1, "lr": 1, "run_dir": "b"},
        {"seed": 2, "lr": 2},
        {"seed": 2, "lr": 1},
    ]
    assert seed_groups(configs) == [[0, 1, 3], [2]]
    assert different_settings(configs) == ["seed", "lr", "run_dir"]
    assert seed_groups([configs[0], configs[0] | {"run_dir": "c"}]) == [[0], [1]], (
        "the same seed again is no other seed"
    )


def test_charts_are_of_figures_that_are_there_and_each_figure_is_drawn_once():
    charts = charts_of(["step", "loss", "reward/style", "reward/length", "odd", "same"], ["same"], ["eval/a/pass@4"])
    assert [(chart["section"], chart["title"], chart["keys"]) for chart in charts] == [
        ("learning", "Loss", ["loss"]),
        ("other", "odd", ["odd"]),
        ("other", "reward", ["reward/length", "reward/style"]),
        ("other", "Evaluation: pass@4", []),
    ]
