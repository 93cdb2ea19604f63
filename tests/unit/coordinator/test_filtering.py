"""Test groups without effect in the coordinator: replaced under dynamic batching, else counted without samples.

g = 2, tbs * dp = 2, K = 2. A group is right and wrong unless said otherwise, and the filter wants just that.
"""

import pytest

from coati_rl.batching.packing import build_mini_batch
from coati_rl.errors import RunError
from coati_rl.work import FinishWork, SaveWork, SyncWork, TrainWork
from tests.unit.coordinator.driver import Run, position_of, resumed, rollouts, trained

FILTERED = {"rules": {"filter_range": (0.01, 0.99), "filter_truncated_response": True}}
DYNAMIC = {**FILTERED, "dynamic_batching": True}
RIGHT, WRONG = {"rewards": [1.0, 1.0]}, {"rewards": [0.0, 0.0]}
CUT_OFF = {"finish_reason": "length"}


def half_is_useless(uid):
    """Every fourth prompt is always right, every fourth always wrong."""
    return {1: RIGHT, 3: WRONG}.get(number_of(uid) % 4, {})


def number_of(uid):
    return int(uid.removeprefix("train-").split(".")[0])


@pytest.fixture
def make_run(make_coordinator, make_group):
    def make(num_prompts, *, reply=lambda uid: {}, **changes):
        return Run(make_coordinator(num_prompts, **changes), make_group, reply)

    return make


@pytest.mark.parametrize("mini_batch", [1, 2])
@pytest.mark.parametrize("n_behind", [0, 1])
def test_dynamic_batching_fills_every_step_with_prompts_that_have_an_effect(make_run, tmp_path, n_behind, mini_batch):
    sizes = {"n_behind": n_behind, "train_minibatch_size": mini_batch}
    run = make_run(24, reply=half_is_useless, **sizes, **DYNAMIC)
    run.until(FinishWork)
    steps, uids = zip(*trained(tmp_path), strict=True)
    assert steps == (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6)
    assert sorted(number_of(uid) for uid in uids) == list(range(0, 24, 2))
    assert {number_of(line["uid"]) % 2 for line in rollouts(tmp_path) if not line["is_trained"]} == {1}
    items = [item for item in run.items if not isinstance(item, TrainWork) or item.batch.is_last]
    train_train_sync = [TrainWork, TrainWork, SyncWork]
    assert [type(item) for item in items] == [*train_train_sync * 3, SaveWork, FinishWork]
    assert {item.batch.loss_scale for item in items if isinstance(item, TrainWork)} == {1 / 4}


def test_counts_of_a_run_add_up(make_run, tmp_path):
    run = make_run(24, reply=half_is_useless, num_episodes=2, **DYNAMIC)
    run.until(FinishWork)
    records = run.events("step")
    assert len(records) == 12  # 48 prompts, half of them in steps of 2
    assert [record["groups_total"] - record["groups_filtered"] for record in records] == [2] * 12
    assert [record["samples_in_loss"] for record in records] == [4] * 12
    lines = rollouts(tmp_path)
    for record in records:
        of_step = [line for line in lines if line["step"] == record["step"]]
        assert len(of_step) == 2 * record["groups_total"]
        assert record["reward_mean"] == pytest.approx(sum(line["reward"] for line in of_step) / len(of_step))
        assert record["num_response_tokens"] == sum(line["num_tokens"] for line in of_step)
    uids = [line["uid"] for line in lines if line["sample"] == 0]
    assert len(uids) == len(set(uids)), "no prompt twice in an episode"
    (finished,) = run.events("finished")
    assert (finished["step"], finished["groups_dropped"]) == (12, 0)
    assert sum(record["groups_total"] for record in records) + finished["groups_filtered"] == 48


def test_a_filtered_groups_slot_is_free_at_once_and_a_trained_ones_after_the_sync(make_run):
    run = make_run(24, **DYNAMIC)
    run.lease()
    assert len(run.open) == 4
    run.answer(1, **RIGHT)
    run.answer(1, **CUT_OFF)
    run.lease()
    assert len(run.open) == 4, "two were replaced"
    run.answer(4)
    run.lease()
    assert run.open == []
    assert [type(run.next_work()) for _ in range(3)] == [TrainWork, TrainWork, SyncWork]
    assert run.next_work() is None
    run.lease()
    assert len(run.open) == 4


def test_staleness_stays_within_n_behind_however_many_prompts_are_replaced(make_run):
    run = make_run(64, reply=half_is_useless, n_behind=1, **DYNAMIC)  # n_behind = 1
    for _ in range(200):
        run.lease()
        while run.open:  # producers run ahead as far as slots allow
            run.answer()
            run.lease()
        if isinstance(run.next_work(), FinishWork):
            break
    staleness = [record["staleness_max"] for record in run.events("step")]
    assert len(staleness) == 16
    assert staleness[:4] == [0, 0, 1, 1]
    assert max(staleness) == 1


def test_with_max_steps_a_filtered_prompt_is_replaced_and_no_other_is_drawn(make_run):
    run = make_run(100, max_steps=1, **DYNAMIC)
    run.lease()
    assert len(run.open) == 2
    run.answer(1, **WRONG)
    run.lease()
    assert len(run.open) == 2
    run.answer()
    assert isinstance(run.next_work(), TrainWork)
    run.lease()
    assert run.open == []
    run.until(FinishWork)
    (record,) = run.events("step")
    assert (record["groups_total"], record["groups_filtered"]) == (3, 1)


def test_the_data_end_with_what_does_not_fill_a_step(make_run, tmp_path):
    run = make_run(10, reply=lambda uid: {} if number_of(uid) < 5 else RIGHT, **DYNAMIC)  # 5 of 10 have an effect
    assert run.until(FinishWork).step == 2
    assert run.events("finished")[0]["groups_dropped"] == 1
    assert len(trained(tmp_path)) == 4


def test_without_dynamic_batching_filtered_groups_take_their_place_and_bring_no_samples(make_run, tmp_path):
    run = make_run(6, **FILTERED)
    run.lease()
    run.answer(2, **WRONG)
    run.answer(1, **CUT_OFF)
    run.answer(1)
    first, second = run.next_work().batch, run.next_work().batch
    assert (first.loss_scale, first.plan) == (0.0, ())
    assert second.loss_scale == 1 / 2
    assert [micro.num_tokens for micro in build_mini_batch(second).micro_batches] == [2 * 6]
    run.until(FinishWork)
    records = run.events("step")
    assert [record["groups_total"] for record in records] == [2, 2, 2]
    assert [record["groups_filtered"] for record in records] == [2, 1, 0]
    assert [record["samples_in_loss"] for record in records] == [0, 2, 4]
    assert [record["reward_mean"] for record in records] == [0.0, 0.5, 0.5]
    assert [line["is_trained"] for line in rollouts(tmp_path)].count(True) == 6


def test_without_dynamic_batching_an_undecidable_group_is_replaced_all_the_same(make_run):
    run = make_run(6, **FILTERED)
    run.lease()
    run.answer(1, verdict="invalid")
    run.answer(1, **WRONG)
    run.answer(1)
    assert run.next_work().batch.loss_scale == 1 / 2
    (record,) = run.events("step")
    assert (record["groups_total"], record["groups_filtered"], record["samples_failed"]) == (3, 2, 2)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_run_stops_when_too_many_groups_in_a_row_have_no_effect(make_run, dynamic):
    run = make_run(40, max_empty_groups=6, n_behind=1, **(DYNAMIC if dynamic else FILTERED))  # 3 steps' worth
    run.lease()
    run.answer(1, **WRONG)
    run.answer(1)  # the row begins anew
    run.answer(2, **WRONG)
    run.answer(2, **RIGHT)
    run.answer(1, **CUT_OFF)
    run.next_work()
    run.lease()
    run.coordinator.fail(0, run.open.pop().lease_id, "refused")
    message = (
        r"6 groups in a row, 3 optimizer step\(s\)' worth, had no sample to train: 2 always wrong, 2 always right, "
        r"1 truncated, 1 failed or undecidable; 2 samples failed because: refused; "
        r"use other data .*-g.*-temp.*--filter-range.*-mnt.*--max-empty-batches"
    )
    with pytest.raises(RunError, match=message):
        while run.next_work():
            pass
    run.answer(1)
    with pytest.raises(RunError, match="6 groups in a row"):
        run.next_work()


def test_no_more_prompts_are_drawn_once_the_run_is_to_stop_however_late_trainers_ask(make_run):
    run = make_run(100, reply=lambda uid: RIGHT, max_empty_groups=6, **DYNAMIC)
    num_leased = 0
    for _ in range(10):
        run.lease()
        num_leased += len(run.open)
        run.answer()
    assert num_leased == 8, "two times four"
    with pytest.raises(RunError, match="6 groups in a row"):
        run.next_work()


def test_groups_out_of_range_that_are_neither_right_nor_wrong_are_named_too(make_run):
    run = make_run(8, rules={"filter_range": (0.5, 0.9)}, max_empty_groups=2)
    run.lease()
    run.answer(2)  # 1 of 2 right: on the bound
    with pytest.raises(RunError, match="had no sample to train: 2 out of range otherwise"):
        run.next_work()


def test_a_run_that_is_over_before_its_first_step_says_why(make_run):
    run = make_run(4, **DYNAMIC)
    run.lease()
    run.answer(2, **RIGHT)
    run.coordinator.fail(0, run.open.pop().lease_id, "refused")
    run.answer()
    message = (
        r"before one optimizer step was full: 3 groups had no sample to train \(2 always right, 1 failed or "
        r"undecidable; 2 samples failed because: refused\), and the other 1 are fewer than tbs \* dp = 2; use other"
    )
    with pytest.raises(RunError, match=message):
        run.next_work()


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("save_interval", [1, 2, 3])
def test_a_run_resumed_in_the_middle_trains_every_prompt_with_an_effect_once(
    make_run, make_prompts, tmp_path, save_interval, dynamic
):
    sizes = {"n_behind": 1, "save_interval": save_interval, **(DYNAMIC if dynamic else FILTERED)}
    first = make_run(24, reply=half_is_useless, **sizes)
    first.lease()
    first.answer(5)
    save = first.until(SaveWork)
    second = make_run(24, reply=half_is_useless, **resumed(save, make_prompts(24)), **sizes)
    end = second.until(FinishWork)
    assert end.step == (6 if dynamic else 12)
    uids = [uid for _, uid in trained(tmp_path)]
    assert sorted(number_of(uid) for uid in uids) == list(range(0, 24, 2))
    records = [*first.events("step"), *second.events("step")]
    assert [record["step"] for record in records] == list(range(1, end.step + 1))
    total, filtered = ([record[key] for record in records] for key in ("groups_total", "groups_filtered"))
    if dynamic:
        assert [both - dropped for both, dropped in zip(total, filtered, strict=True)] == [2] * 6
    else:
        assert (total, sum(filtered)) == ([2] * 12, 12)


def test_groups_filtered_before_a_checkpoint_count_towards_the_next_record(make_run, make_prompts):
    sizes = {"n_behind": 1, "save_interval": 2, **DYNAMIC}
    first = make_run(16, **sizes)
    first.lease()
    first.answer(4)
    assert [type(first.next_work()) for _ in range(2)] == [TrainWork, TrainWork]
    first.answer(2, **RIGHT)
    first.answer(2)  # finished, not trained: these are kept
    assert isinstance(first.next_work(), SyncWork)
    save = first.next_work()
    position = position_of(save)
    assert (position.groups_filtered, position.samples_failed, len(position.kept)) == (2, 0, 2)

    second = make_run(16, **resumed(save, make_prompts(16)), **sizes)
    assert isinstance(second.next_work(), SyncWork)
    second.lease()
    assert isinstance(second.next_work(), TrainWork)
    (record,) = second.events("step")
    assert (record["groups_total"], record["groups_filtered"], record["reward_mean"]) == (4, 2, 0.75)


@pytest.mark.parametrize(("max_steps", "progress"), [(None, [2 / 20, 4 / 20]), (4, [2 / 20, 1 / 4])])
def test_the_learning_rates_clock_is_the_one_that_will_end_the_run(make_run, max_steps, progress):
    run = make_run(20, max_steps=max_steps, **DYNAMIC)
    run.lease()
    run.answer(2, **WRONG)
    run.lease()
    run.answer(4)
    assert [run.next_work().batch.learning_rate_progress for _ in range(2)] == progress
