"""Test a greedy answer as baseline: the samples that it needs, and what it takes of an engine."""

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.engine_rules import answers_per_prompt
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError


@pytest.mark.parametrize("estimator", ["remax", "group_mean"])
def test_one_sample_a_prompt_will_do_where_it_is_not_compared_with_others(estimator):
    config = parse(["--advantage-estimator", estimator, "-g", "1", "-tmbs", "1"])[0]
    found = []
    try:
        check(config)
    except ConfigError as error:
        found = [line for line in str(error).splitlines() if "-g 1" in line]
    assert bool(found) == (estimator == "group_mean")


def test_a_greedy_answer_is_one_more_in_flight_for_each_prompt():
    counted = [(each.sequences_in_flight, answers_per_prompt(each)) for each in map(config_of, ("GRPO", "REMAX"))]
    assert counted == [(3 * 4, 4), (3 * 5, 5)]


def config_of(algo):
    return parse(["-a", algo, "-imbs", "3", "-g", "4"])[0]
