"""Test what a run says it waits for: a sentence with numbers for every branch in which nothing can be decided.

2 prompts a step, K = 2, so 4 slots; g = 2, lockstep unless said otherwise.
"""

import pytest

from coati_rl.work import FinishWork, SaveWork, SyncWork, TrainWork, Wait
from tests.unit.coordinator.coordinator_calls import (
    finish_leases,
    lease_all,
    report_commit,
    report_staged,
    report_step,
    report_sync,
    work,
)
from tests.unit.coordinator.driver import Run


def reason(coordinator, index):
    """Why item `index` is not decided."""
    wait = coordinator.next_work(index, rank=0, timeout_s=0)
    assert isinstance(wait, Wait), wait
    assert wait.reason in coordinator.status().text
    return wait.reason


def refusal(coordinator, producer=0, *, is_drained=False):
    """Why a producer gets no prompt."""
    reply = coordinator.lease(producer, max_prompts=1, timeout_s=0, is_drained=is_drained)
    assert reply.leases == ()
    return reply.reason


@pytest.fixture
def trained(make_coordinator, make_group):
    """A run whose first rollout step is trained: its sync is due."""

    def make(**changes):
        coordinator = make_coordinator(**{"num_prompts": 16, **changes})
        coordinator.add_producer(0, version=0)
        leases = lease_all(coordinator)
        finish_leases(coordinator, make_group, leases)
        for step in (0, 1):
            assert isinstance(work(coordinator, step), TrainWork)
            report_step(coordinator, step)
        return coordinator

    return make


def test_before_the_first_producer_is_there(make_coordinator):
    expected = (
        "waiting for the first producer: its engine is loading; "
        "waiting for rollouts: 0 of 2 groups of step 1 are finished, 0 prompts are being sampled"
    )
    assert reason(make_coordinator(), 0) == expected


def test_rollouts(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=16)
    for producer in (0, 1):
        coordinator.add_producer(producer, version=0)
    leases = coordinator.lease(0, max_prompts=3, timeout_s=0).leases
    coordinator.lease(1, max_prompts=1, timeout_s=0)
    finish_leases(coordinator, make_group, leases[:1])
    expected = "waiting for rollouts: 1 of 2 groups of step 1 are finished, 3 prompts are being sampled by 2 producers"
    assert reason(coordinator, 0) == expected


def test_rollouts_of_a_step_that_has_begun(make_coordinator, make_group):
    coordinator = make_coordinator(train_minibatch_size=1)
    coordinator.add_producer(0, version=0)
    leases = lease_all(coordinator)
    finish_leases(coordinator, make_group, leases[:1])
    work(coordinator, 0)
    expected = "waiting for rollouts: 1 of 2 groups of step 1 are finished, 3 prompts are being sampled by 1 producer"
    assert reason(coordinator, 1) == expected


def test_a_producer_that_is_replaced(make_coordinator):
    coordinator = make_coordinator()
    for producer in (0, 1):
        coordinator.add_producer(producer, version=0)
    lease_all(coordinator)
    coordinator.remove_producer(0, "killed")
    expected = (
        "waiting for a replacement of producer 0; waiting for rollouts: 0 of 2 groups of step 1 are finished, "
        "0 prompts are being sampled, 4 prompts of a lost producer will be sampled again"
    )
    assert reason(coordinator, 0) == expected
    lease_all(coordinator, producer=1)
    coordinator.add_producer(2, version=0)
    expected = "waiting for rollouts: 0 of 2 groups of step 1 are finished, 4 prompts are being sampled by 1 producer"
    assert reason(coordinator, 0) == expected


def test_a_sync_that_has_nobody_to_go_to(trained):
    coordinator = trained()
    coordinator.remove_producer(0, "killed")
    assert reason(coordinator, 2) == "waiting for a replacement of producer 0, for the weight sync to version 2"


def test_the_transfer_of_weights(trained):
    coordinator = trained()
    work(coordinator, 2)
    assert reason(coordinator, 3) == "waiting for the transfer of version 2 to producer 0"


def test_a_commit_before_the_next_sync(trained, make_group):
    coordinator = trained(n_behind=1)
    report_staged(coordinator, work(coordinator, 2))
    for index in (3, 4):
        assert isinstance(work(coordinator, index), TrainWork)
    assert reason(coordinator, 5) == "waiting for producer 0 to commit version 2, before version 4 is sent"
    report_commit(coordinator, 0, 2)
    assert isinstance(work(coordinator, 5), SyncWork)


def test_the_last_commit(trained):
    coordinator = trained(num_prompts=4)
    report_staged(coordinator, work(coordinator, 2))
    assert isinstance(work(coordinator, 3), SaveWork)
    assert reason(coordinator, 4) == "waiting for producer 0 to commit version 2, the last one"
    report_commit(coordinator, 0, 2)
    assert work(coordinator, 4) == FinishWork(step=2)
    assert reason(coordinator, 5) == "the run is over"


def test_an_evaluation(make_coordinator, make_group):
    coordinator = make_coordinator(eval_prompts=3, eval_interval=1)
    coordinator.add_producer(0, version=0)
    evaluation = coordinator.lease(0, max_prompts=3, timeout_s=0).leases
    finish_leases(coordinator, make_group, [*lease_all(coordinator), evaluation[0]])
    work(coordinator, 0), work(coordinator, 1)
    assert reason(coordinator, 2) == "waiting for the evaluation at step 0: 1 of 3 prompts are answered"
    coordinator.fail(0, evaluation[1].lease_id, "refused")
    assert reason(coordinator, 2) == "waiting for the evaluation at step 0: 2 of 3 prompts are answered"


def test_an_older_prompt_that_would_be_too_stale_otherwise(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=40, n_behind=1)
    coordinator.add_producer(0, version=0)
    _, *others = lease_all(coordinator)
    finish_leases(coordinator, make_group, others)
    work(coordinator, 0), work(coordinator, 1)
    report_sync(coordinator, work(coordinator, 2))
    work(coordinator, 3)
    finish_leases(coordinator, make_group, lease_all(coordinator), version=2)
    expected = "waiting for an older prompt, to be trained before the weights change again (--n-behind 1): "
    assert reason(coordinator, 4) == f"{expected}1 prompt is being sampled by 1 producer"


def test_prompts_that_older_weights_sample_before_a_checkpoint(make_coordinator, make_group):
    run = Run(make_coordinator(num_prompts=20, n_behind=1, save_interval=2), make_group)
    run.lease()
    run.answer(7)
    assert [type(run.next_work()) for _ in range(3)] == [TrainWork, TrainWork, SyncWork]
    expected = "waiting for 1 prompt that older weights sample, before the checkpoint of step 2"
    assert reason(run.coordinator, 3) == expected


def test_no_free_slots(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=16)
    coordinator.add_producer(0, version=0)
    leases = lease_all(coordinator)
    finish_leases(coordinator, make_group, leases[:3])
    work(coordinator, 0)
    expected = (
        "no free slots: all 4 are taken (1 prompt being sampled, 1 group finished, 2 trained since the last weight "
        "sync)"
    )
    assert refusal(coordinator) == expected
    assert expected not in coordinator.status().text, "it has a prompt to sample"
    coordinator.add_producer(1, version=0)
    text = coordinator.status().text
    assert text.startswith("step 1 is being trained; ") and text.endswith(f"producer 1: {expected}")


def test_no_prompts(make_coordinator):
    coordinator = make_coordinator(num_prompts=4)
    for producer in (0, 1, 2):
        coordinator.add_producer(producer, version=0)
    lease_all(coordinator)
    assert refusal(coordinator, 1) == "no prompts are left: all 4 were drawn"
    assert coordinator.status().text.endswith("producers 1, 2: no prompts are left: all 4 were drawn")


def test_no_need_of_prompts(make_coordinator):
    coordinator = make_coordinator(num_prompts=16, max_steps=1)
    coordinator.add_producer(0, version=0)
    lease_all(coordinator)
    assert refusal(coordinator) == "no further prompt is needed: there are enough for all 1 steps"


def test_producers_that_have_weights_to_get_or_to_commit(trained):
    coordinator = trained()
    coordinator.add_producer(1)
    assert refusal(coordinator, 1) == "it has not received version 0 yet"
    report_staged(coordinator, work(coordinator, 2))
    assert isinstance(coordinator.next_work(3, rank=0, timeout_s=0), Wait)  # the sync is complete with this
    assert refusal(coordinator, 1) == "it has to commit version 2 first"


def test_what_is_trained_and_saved_is_said_too(trained):
    coordinator = trained(save_interval=2)
    report_sync(coordinator, work(coordinator, 2))
    assert isinstance(work(coordinator, 3), SaveWork)
    assert "the checkpoint of step 2 is being written" in coordinator.status().text
    coordinator.report_saved(2, "there")
    assert "checkpoint" not in coordinator.status().text


def test_the_end(trained):
    coordinator = trained(num_prompts=4)
    report_sync(coordinator, work(coordinator, 2))
    work(coordinator, 3), work(coordinator, 4)
    assert refusal(coordinator) == "the run is over"


def test_a_status_tells_how_long_nothing_was_finished(make_coordinator):
    coordinator = make_coordinator()
    coordinator.add_producer(0, version=0)
    assert 0.0 <= coordinator.status().idle_s < 5.0
