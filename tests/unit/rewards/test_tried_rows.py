"""Test the scoring of rows of the dataset before a run: which stop it, which are a warning, how long they take."""

from types import SimpleNamespace

import pytest

from coati_rl.config import Config
from coati_rl.errors import RunError
from coati_rl.types import Prompt
from rewards.tried_rows import TriedRows, try_rows

OWN = """
import time

def raises(response, ground_truth):
    return 1 / (int(ground_truth) - 7)

def raises_for_nothing(response, ground_truth):
    return float(len(response.split()[0]))

def right(response, ground_truth):
    return float(response == ground_truth)

def hangs(response, ground_truth):
    time.sleep(30 * (int(ground_truth) == 7))
    return 0.0
"""


@pytest.fixture
def tried(tmp_path):
    """(function, number of rows, more settings) -> what was found, and the configuration; row n has the truth n."""
    (tmp_path / "own.py").write_text(OWN)

    def run(function, number=12, **settings):
        values = {"num_inferencer": 1, "num_trainers": 1, "inference_batch_size": 4, "train_batch_size": 4}
        reward_type = function if function == "none" or "://" in function else f"{tmp_path}/own.py:{function}"
        config = Config(model="m", dataset="d", reward_type=reward_type, max_new_tokens=64, **{**values, **settings})
        prompts = [Prompt(uid=f"train-{n}", token_ids=(1,) * (n + 1), ground_truth=str(n)) for n in range(number)]
        prepared = SimpleNamespace(config=config, read_prompts=prompts, source=None, evaluation={})
        return try_rows(prepared, limit_s=10.0), config

    return run


def test_a_row_on_which_the_reward_raises_stops_a_run_whose_step_it_fills_by_more_than_the_rate(tried):
    found, config = tried("raises")
    assert [*found.failed] == ["train-7"] and "ZeroDivisionError" in found.failed["train-7"]
    assert found.num_tried == found.num_rows == 12
    problem = found.problem(config)  # one of 4 prompts has no score, which is more than 0.1
    assert "1 of 12 rows have no score, the first is train-7" in problem and "--max-failure-rate 0.1" in problem
    assert found.problem(config.with_changes(max_failure_rate=0.5)) is None
    assert "train-7" in next(found.warnings())


@pytest.mark.full
def test_a_reward_that_raises_for_an_empty_response_alone_is_a_warning(tried):
    found, config = tried("raises_for_nothing")
    assert found.problem(config) is None
    assert len(found.partly) == 12 and "some of their responses" in next(found.warnings())


@pytest.mark.full
def test_a_row_that_takes_longer_than_its_limit_where_others_are_fast_hangs(tried):
    found, config = tried("hangs", reward_timeout_s=0.5)
    assert found.hung == ["train-7"]
    assert "no score within" in found.problem(config)


def test_a_service_that_does_not_answer_is_named_at_once(tried):
    with pytest.raises(RunError, match=r"nothing answers at 127\.0\.0\.1:9 \(.*refused"):
        tried("http://127.0.0.1:9/score")


def test_a_row_that_is_slower_than_a_trial_and_within_the_users_limit_is_a_warning():
    found = TriedRows(num_rows=3, num_tried=2, hung=["train-0", "train-1"])
    config = Config(model="m", dataset="d", reward_type="http://127.0.0.1:9/score", train_batch_size=4)
    assert found.problem(config) is None  # --reward-timeout-s is 60
    assert "no score within 10 s;" in found.problem(config.with_changes(reward_timeout_s=10.0))


def test_a_reward_that_is_slow_on_all_rows_is_no_hang():
    found = TriedRows(num_rows=3, num_tried=3, seconds=[9.0, 9.5, 9.1], slowest="train-1", hung=["train-2"])
    config = Config(model="m", dataset="d")
    assert found.problem(config) is None
    assert "took longer" in next(found.warnings())
    assert "the slowest 9.5 s (train-1)" in found.finding(config)


def test_every_row_is_scored_and_rewards_that_others_give_are_not_tried(tried):
    found, config = tried("right")
    assert (found.failed, found.partly, found.hung) == ({}, {}, [])
    assert "12 of 12 rows" in found.finding(config)
    assert tried("none")[0] is None
