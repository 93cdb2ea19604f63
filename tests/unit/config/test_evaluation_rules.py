"""Test by which metrics the best checkpoint is chosen, and how many samples are scored together."""

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError


def test_groups_to_be_scored_have_the_samples_of_an_evaluation_too():
    sampled = ["-g", "4", "--eval-samples", "16", "--eval-temperature", "1"]
    assert parse(["-g", "4"])[0].sampling.largest_group == 4
    assert parse(sampled)[0].sampling.largest_group == 16


EVALUATED = ["-ed", "math=a.jsonl", "-ei", "20", "-si", "100"]


def test_the_best_is_by_a_metric_that_the_evaluations_have():
    sampled = ["--eval-samples", "6", "--eval-temperature", "1"]
    for metric in ("accuracy", "reward_mean", "avg@6", "pass@4", "pass@6"):
        check(parse([*EVALUATED, *sampled, "--keep-best", f"eval/math/{metric}"])[0])
    message = "--keep-best eval/math/pass@3: is no metric of the evaluations; use one of eval/math/accuracy, eval/"
    with pytest.raises(ConfigError, match=message):
        check(parse([*EVALUATED, *sampled, "--keep-best", "eval/math/pass@3"])[0])
    with pytest.raises(ConfigError, match=r"use one of eval/math/accuracy, eval/math/reward_mean$"):
        check(parse([*EVALUATED, "--keep-best", "accuracy"])[0])


def test_evaluations_need_a_set():
    with pytest.raises(ConfigError, match="--eval-interval 1: needs --eval-dataset, or -1 to switch it off"):
        check(parse(["-ei", "1"])[0])


def test_the_best_needs_evaluations_and_one_of_every_checkpoint():
    with pytest.raises(ConfigError, match="--keep-best eval/math/accuracy: there are no evaluations; give -ed"):
        check(parse(["--keep-best", "eval/math/accuracy", "-ed", "math=a.jsonl"])[0])
    flags = ["-ed", "math=a.jsonl", "-ei", "30", "--keep-best", "eval/math/accuracy"]
    with pytest.raises(ConfigError, match="-si must be a multiple of -ei, nearest: -si 90"):
        check(parse([*flags, "-si", "100"])[0])
    with pytest.raises(ConfigError, match="-si must be a multiple of -ei, nearest: -si 30"):
        check(parse([*flags, "-si", "-1"])[0])
    check(parse([*flags, "-si", "90"])[0])
