"""Test what is refused beside a greedy answer as baseline, and what it takes of an engine."""

import pytest

from coati_rl.config.algorithm_rules import algorithm_problems
from coati_rl.config.cli import parse
from coati_rl.config.engine_rules import answers_per_prompt
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError


def problems(text):
    return [*algorithm_problems(parse(text.split())[0])]


@pytest.mark.parametrize(
    ("text", "begin", "remedies"),
    [
        (
            "--turn-advantages 0.9 --advantage-estimator remax",
            "--turn-advantages 0.9 with --advantage-estimator remax: samples are compared with the reward of a whole ",
            ["--turn-advantages None", "--advantage-estimator leave_one_out"],
        ),
        (
            "-a REMAX --distill-only --teacher big",
            "--distill-only with --advantage-estimator remax: its greedy answers would be generated for nothing, ",
            ["--advantage-estimator reward", "--no-distill-only"],
        ),
    ],
)
def test_what_has_no_greedy_reward_to_compare_with_is_refused_once(text, begin, remedies):
    (problem,) = problems(text)
    assert problem.startswith(begin)
    assert [problems(f"{text} {remedy}") for remedy in remedies] == [[]] * len(remedies)


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
