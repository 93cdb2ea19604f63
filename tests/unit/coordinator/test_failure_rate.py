"""Test how many samples may fail before a run stops: a share of those that came in. g = 2, tbs * dp = 2, K = 2."""

import math

import pytest

from coati_rl.errors import RunError
from coati_rl.work import FinishWork, TrainWork
from tests.unit.coordinator.driver import Run

DYNAMIC = {"rules": {"filter_range": (0.01, 0.99)}, "dynamic_batching": True}
RIGHT = {"rewards": [1.0, 1.0]}


@pytest.fixture
def make_run(make_coordinator, make_group):
    def make(num_prompts, *, reply=lambda uid: {}, **changes):
        return Run(make_coordinator(num_prompts, **changes), make_group, reply)

    return make


def test_failures_are_weighed_against_all_samples_that_came_in_for_the_step(make_run):
    run = make_run(40, max_failure_rate=0.5, n_behind=1, **DYNAMIC)  # 2 of 4
    run.lease()
    run.answer(2, **RIGHT)  # 4 scored samples that were dropped: 4 of 8 may fail now
    run.answer(2, verdict="invalid")
    assert run.next_work() is None
    run.answer(1, verdict="invalid")
    with pytest.raises(RunError, match="6 samples of one step failed or could not be scored, 4 are allowed"):
        run.next_work()


def test_failures_are_weighed_against_groups_that_came_in_for_later_steps_too(make_run):
    run = make_run(20, max_failure_rate=0.25, sync_period=4)  # 1 of a step's 4 samples
    run.lease()
    run.answer(4, rewards=[1.0, math.nan])
    run.answer(4)
    assert isinstance(run.next_work(), TrainWork), "4 of 16 failed"


def test_a_rate_allows_for_the_share_that_it_names_in_spite_of_rounding(make_run):
    run = make_run(100, max_failure_rate=0.29, train_batch_size=50, train_minibatch_size=50, sync_period=1)
    run.lease()
    run.answer(29, rewards=[1.0, math.nan])
    run.answer(21)
    assert isinstance(run.next_work(), TrainWork), "29 of 100 failed; in float64 0.29 * 100 is below 29"


def test_a_rate_below_one_sample_of_a_step_allows_for_failures_among_many_samples(make_run):
    run = make_run(60, max_failure_rate=0.07, **DYNAMIC)  # 0.28 of a step's 4 samples
    for _ in range(12):
        run.lease()
        run.answer(4, **RIGHT)
    run.lease()
    run.answer(1, rewards=[1.0, math.nan])
    run.answer(2, verdict="invalid")
    run.lease()
    run.answer(2)
    assert isinstance(run.next_work(), TrainWork), "of 96 + 4 scored ones 7 may fail, and 5 did"


def test_samples_without_a_finite_log_probability_are_counted_and_past_the_limit_stop_the_run(make_run):
    impossible = {"logprob": -math.inf}
    run = make_run(8, reply=lambda uid: impossible if uid.startswith("train-0.") else {}, num_episodes=1)
    run.until(FinishWork)
    records = run.events("step")
    assert sum(record["samples_invalid"] for record in records) == 2
    assert sum(record["samples_failed"] for record in records) == 2
    run = make_run(8, reply=lambda uid: impossible, max_failure_rate=0.25)
    with pytest.raises(RunError, match=r"because: the engine's log-probability of a token is not finite"):
        run.until(FinishWork)
