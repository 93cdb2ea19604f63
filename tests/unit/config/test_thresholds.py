"""Test for which rewards a threshold decides what is correct."""

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.commands import OFFLINE
from coati_rl.config.thresholds import common_threshold, thresholds

RUN = ["-m", "model", "-d", "data.jsonl"]


@pytest.mark.parametrize(
    ("flags", "threshold"),
    [
        (["-rt", "own.py:score"], 1.0),
        (["-rt", "own.py:score", "--correct-from", "0.5"], 0.5),
        (["-rt", "model:judge", "--correct-from", "0"], 0.0),
        (["-rt", "http://127.0.0.1:8000/score"], 1.0),
        (["-rt", "boxed"], None),
        (["-rt", "none"], None),
        (["-rt", "own.py:score=1,brevity.py:score=0.5"], None),  # the sum of two rewards decides nothing
    ],
)
def test_one_graded_reward_has_a_threshold(flags, threshold):
    config, _ = parse([*RUN, *flags])
    assert thresholds(config) == ({} if threshold is None else {"default": threshold})
    assert common_threshold(config) == threshold


def test_tasks_that_differ_have_no_common_one():
    tasks = '{"easy": {"reward_type": "own.py:score"}, "hard": {"reward_type": "own.py:score", "correct_from": 2}}'
    config, _ = parse(["-m", "model", "-d", "easy=a.jsonl", "-d", "hard=b.jsonl", "--tasks", tasks])
    found = thresholds(config)
    assert (found["easy"], found["hard"]) == (1.0, 2.0)
    assert common_threshold(config) is None


def test_jobs_on_a_dataset_have_none():
    assert common_threshold(OFFLINE["sft"](model="model", dataset="data.jsonl")) is None
