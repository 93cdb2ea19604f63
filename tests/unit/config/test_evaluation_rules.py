"""Test which settings of evaluations are refused, with the remedy."""

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--eval-samples", "8"], "--eval-samples 8: greedy answers to a prompt are all the same; give --eval-temp"),
        (["--eval-top-p", "0.9"], "--eval-top-p 0.9: has no effect on greedy answers; give --eval-temperature 1"),
    ],
)
def test_sampling_settings_without_a_temperature_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        check(parse(flags)[0])
    check(parse([*flags, "--eval-temperature", "1"])[0])


def test_groups_to_be_scored_have_the_samples_of_an_evaluation_too():
    sampled = ["-g", "4", "--eval-samples", "16", "--eval-temperature", "1"]
    assert parse(sampled)[0].largest_group == 4, "there is nothing to evaluate"
    assert parse([*sampled, "-ed", "math=a.jsonl"])[0].largest_group == 16
