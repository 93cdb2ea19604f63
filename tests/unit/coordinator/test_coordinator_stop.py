"""An interrupted run is saved as it is, at once, and goes on from there without loss."""

import pytest

from coati_rl.work import FinishWork, SaveWork, SyncWork, TrainWork
from tests.unit.coordinator.coordinator_calls import report_sync
from tests.unit.coordinator.driver import Run, resumed, trained

ALL = sorted(f"train-{i}.0" for i in range(16))


@pytest.mark.parametrize("n_behind", [0, 1])
@pytest.mark.parametrize("answered", [0, 1, 2, 3])
def test_what_is_trained_is_saved_and_a_resumed_run_trains_the_rest(
    make_coordinator, make_group, make_prompts, tmp_path, n_behind, answered
):
    # 16 prompts, 2 a step in two mini-batches, K = 2: stopped after step 3, between two syncs, or within step 4.
    sizes = {"num_prompts": 16, "n_behind": n_behind, "train_minibatch_size": 1}
    first = Run(make_coordinator(**sizes), make_group)
    while not (isinstance(item := first.until(TrainWork), TrainWork) and item.batch.step == 2 and item.batch.is_last):
        pass
    first.lease()
    first.answer(answered)
    first.next_work()  # with an answer: the first mini-batch of step 4, which will not be filled
    first.coordinator.stop()
    save = first.next_work()
    assert isinstance(save, SaveWork) and save.step == 3
    assert first.next_work() == FinishWork(step=3)
    assert first.coordinator.lease(0, max_prompts=1, timeout_s=0).is_finished
    assert first.events("finished") == [], "it was not over"

    second = Run(make_coordinator(**sizes, **resumed(save, make_prompts(16))), make_group)
    second.until(FinishWork)
    steps, uids = zip(*trained(tmp_path), strict=True)
    assert steps == tuple(step for step in range(1, 9) for _ in range(2))
    assert sorted(uids) == ALL


def test_a_step_that_is_saved_is_not_saved_again(make_coordinator, make_group):
    run = Run(make_coordinator(num_prompts=16, save_interval=2), make_group)
    run.until(SaveWork)
    run.coordinator.stop()
    assert run.next_work() == FinishWork(step=2)


def test_before_the_first_step_there_is_nothing_to_save(make_coordinator, make_group):
    run = Run(make_coordinator(num_prompts=16), make_group)
    run.lease()
    run.coordinator.stop()
    assert run.next_work() == FinishWork(step=0)


def test_neither_a_sync_nor_an_evaluation_that_is_due_holds_it_up(make_coordinator, make_group):
    run = Run(make_coordinator(num_prompts=16, eval_prompts=1, eval_interval=2), make_group)
    while run.until(TrainWork).batch.step < 1:
        pass
    run.coordinator.stop()  # the sync of step 2 is due now
    assert isinstance(run.next_work(), SaveWork)
    assert isinstance(run.next_work(), FinishWork)


def test_a_transfer_that_is_under_way_ends_first(make_coordinator, make_group):
    run = Run(make_coordinator(num_prompts=16), make_group)
    while run.until(TrainWork).batch.step < 1:
        pass
    sync = run.coordinator.next_work(len(run.items), rank=0, timeout_s=0)
    assert isinstance(sync, SyncWork)
    run.items.append(sync)
    run.coordinator.stop()
    assert run.next_work() is None
    report_sync(run.coordinator, sync)
    assert isinstance(run.next_work(), SaveWork)


def test_no_prompt_is_handed_out_any_more(make_coordinator):
    coordinator = make_coordinator(num_prompts=16)
    coordinator.add_producer(0, version=0)
    coordinator.stop()
    assert coordinator.lease(0, max_prompts=4, timeout_s=0).leases == ()
