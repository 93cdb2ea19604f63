"""Test several optimizer steps on each batch: their order, and what waits for a batch's last one.

Four prompts make a rollout step of K = 2 batches of two prompts each, unless a test says otherwise.
"""

import pytest

from coati_rl.work import FinishWork, RepeatWork, SaveWork, SyncWork, TrainWork
from tests.unit.coordinator.driver import Run, position_of, resumed, rollouts, trained


@pytest.fixture
def run_of(make_coordinator, make_group):
    """(updates per batch, batches per weight sync, further settings) -> one producer and one trainer."""

    def make(num_updates, num_batches=2, **changes):
        settings = {"updates_per_batch": num_updates, "sync_period": num_updates * num_batches, **changes}
        return Run(make_coordinator(**settings), make_group)

    return make


def described(items):
    """Items in words: the step, of a repeated one after a colon that of its first update."""

    def describe(item):
        if isinstance(item, TrainWork):
            return f"train {item.batch.step}"
        if isinstance(item, RepeatWork):
            return f"train {item.step}:{item.first_step}{' last' if item.is_last else ''}"
        if isinstance(item, SyncWork):
            return f"sync {item.policy_version}"
        return f"{type(item).__name__.removesuffix('Work').lower()} {item.step}"

    return [describe(item) for item in items]


def test_a_rollout_steps_batches_are_trained_once_then_all_again_and_then_weights_are_sent(run_of):
    run = run_of(3, num_prompts=4)
    run.until(FinishWork)
    assert described(run.items) == [
        *("train 0", "train 1"),
        *("train 2:0", "train 3:1"),
        *("train 4:0 last", "train 5:1 last"),
        *("sync 6", "save 6", "finish 6"),
    ]


def test_one_update_orders_what_a_run_without_the_setting_orders(run_of, make_coordinator, make_group):
    plain = Run(make_coordinator(), make_group)
    plain.until(FinishWork)
    run = run_of(1)
    run.until(FinishWork)
    assert described(run.items) == described(plain.items)
    assert all("update" not in event for event in plain.events("step"))


def test_checkpoints_evaluations_and_syncs_come_after_a_batchs_last_update_only(run_of):
    # Both are due after each step, and wait for the next weight sync: every second step.
    run = run_of(2, 1, num_prompts=8, save_interval=1, eval_interval=1, eval_prompts=1)
    run.until(FinishWork)
    assert [item.step for item in run.items if isinstance(item, SaveWork)] == [2, 4, 6, 8]
    assert [item.policy_version for item in run.items if isinstance(item, SyncWork)] == [2, 4, 6, 8]
    assert [event["step"] for event in run.events("evaluation")] == [0, 2, 4, 6, 8]


def test_an_interval_is_rounded_up_to_the_end_of_a_batch(run_of):
    run = run_of(4, 1, num_prompts=8, save_interval=6)
    run.until(FinishWork)
    assert [item.step for item in run.items if isinstance(item, SaveWork)] == [8, 12, 16]


@pytest.mark.parametrize("n_behind", [0, 1])
def test_every_group_counts_once_and_is_written_with_its_first_update(run_of, tmp_path, n_behind):
    run = run_of(2, num_prompts=12, n_behind=n_behind)
    run.until(FinishWork)
    steps = run.events("step")
    assert [record["step"] for record in steps] == [*range(1, 13)]
    assert [record["update"] for record in steps] == [0, 0, 1, 1] * 3
    assert [record["groups_total"] for record in steps] == [2, 2, 0, 0] * 3
    assert [record["num_response_tokens"] > 0 for record in steps] == [True, True, False, False] * 3
    assert [record["reward_mean"] for record in steps] == [0.5, 0.5, None, None] * 3
    assert [record["samples_in_loss"] for record in steps] == [4] * 12, "each update trains them"
    assert max(record["staleness_max"] for record in steps) <= n_behind
    assert len(rollouts(tmp_path)) == 12 * 2
    assert [step for step, _ in trained(tmp_path)] == [step for step in (1, 2, 5, 6, 9, 10) for _ in range(2)]
    assert len({uid for _, uid in trained(tmp_path)}) == 12
    keys = {frozenset(record) for record in steps}
    assert len(keys) == 1, "each record has every key"


def test_groups_keep_their_slots_until_the_weights_after_the_last_update_are_sent(run_of):
    run = run_of(2, num_prompts=12)
    run.lease()
    run.answer()
    for _ in range(4):
        assert run.next_work() is not None
        run.lease()
        assert run.open == []
    assert isinstance(run.next_work(), SyncWork)
    assert isinstance(run.next_work(), type(None))
    run.lease()
    assert len(run.open) == 4


def test_groups_that_are_filtered_meanwhile_are_counted_with_the_next_batch(run_of, make_group):
    # Without effect, and replaced: one prompt of the second batch. It is answered between the first one's updates.
    filtered = {"dynamic_batching": True, "rules": {"filter_range": (0.0, 1.0)}}
    run = run_of(2, 1, num_prompts=20, n_behind=1, **filtered)
    run.lease()
    run.answer(2)
    assert isinstance(run.next_work(), TrainWork)
    run.answer(1, rewards=[1.0, 1.0])
    assert isinstance(run.next_work(), RepeatWork)
    run.until(SyncWork)
    while run.until(TrainWork).batch.step < 2:
        pass
    assert [(event["groups_total"], event["groups_filtered"]) for event in run.events("step")] == [
        (2, 0),
        (0, 0),
        (3, 1),
    ]


@pytest.mark.parametrize("mini_batch", [1, 2])
@pytest.mark.parametrize(
    ("num_batches", "stopped_after", "rest"),
    [
        (1, 1, ["train 1:0", "train 2:0 last", "save 3"]),
        (1, 2, ["train 2:0 last", "save 3"]),
        (2, 1, ["train 1:0", "train 2:0 last", "save 3"]),  # the second batch is not begun, or not complete
        (2, 2, ["train 2:0", "train 3:1", "train 4:0 last", "train 5:1 last", "save 6"]),
        (2, 5, ["train 5:1 last", "save 6"]),
    ],
)
def test_a_stopped_run_finishes_the_updates_of_its_batches_and_is_resumed_after_them(
    run_of, make_prompts, tmp_path, mini_batch, num_batches, stopped_after, rest
):
    sizes = {"num_prompts": 8, "train_minibatch_size": mini_batch}
    first = run_of(3, num_batches, **sizes)
    first.lease()
    first.answer()
    num_taken = 0
    while num_taken < stopped_after:
        item = first.next_work()
        num_taken += isinstance(item, RepeatWork) or item.batch.is_last
    if mini_batch == 1 and (num_batches, stopped_after) == (2, 1):
        assert not first.next_work().batch.is_last  # half of a batch, which will not be completed
    first.coordinator.stop()
    before = len(first.items)
    while not isinstance(first.next_work(), FinishWork):
        pass
    assert described(first.items[before:-1]) == rest
    save = first.items[-2]
    assert position_of(save).step == save.step

    second = run_of(3, num_batches, **sizes, **resumed(save, make_prompts(8)))
    second.until(FinishWork)
    assert second.items[-1].step == 12, "four batches in all"
    assert sorted(uid for _, uid in trained(tmp_path)) == [f"train-{i}.0" for i in range(8)]
    due = [step for step in range(3 * num_batches, 13, 3 * num_batches) if step > save.step]
    assert [item.policy_version for item in second.items if isinstance(item, SyncWork)][-len(due) :] == due


def test_a_last_rollout_step_that_the_data_do_not_fill_has_all_updates_too(run_of):
    run = run_of(2, num_prompts=7)  # a rollout step of two batches, then one of one batch; one prompt is left over
    run.until(FinishWork)
    assert described(run.items)[4:] == ["sync 4", "train 4", "train 5:4 last", "sync 6", "save 6", "finish 6"]
    assert run.events("finished")[0]["groups_dropped"] == 1


def test_max_steps_counts_optimizer_steps(run_of):
    run = run_of(2, num_prompts=20, max_steps=6)
    run.until(FinishWork)
    assert described(run.items)[4:] == ["sync 4", "train 4", "train 5:4 last", "sync 6", "save 6", "finish 6"]
    assert sum(event["groups_total"] for event in run.events("step")) == 6
    assert not run.open, "no prompt is sampled beyond those that three batches take"


@pytest.mark.parametrize("max_steps", [None, 12])
def test_the_learning_rate_follows_optimizer_steps(run_of, max_steps):
    run = run_of(3, num_prompts=8, max_steps=max_steps)  # 4 batches: 12 steps, by prompts or by steps
    run.until(FinishWork)
    steps = [item for item in run.items if isinstance(item, TrainWork | RepeatWork)]
    done = [item.batch.learning_rate_progress if isinstance(item, TrainWork) else item.learning_rate_progress
            for item in steps]  # fmt: skip
    assert done == pytest.approx([step / 12 for step in range(12)])


def test_a_producer_that_is_replaced_meanwhile_gets_the_weights_of_the_last_update(run_of):
    run = run_of(2, num_prompts=12)
    run.lease()
    run.answer()
    for _ in range(3):
        run.next_work()
    run.coordinator.remove_producer(0, "it died")
    run.coordinator.add_producer(1)
    assert described([run.next_work()]) == ["train 3:1 last"]
    sync = run.coordinator.next_work(len(run.items), rank=0, timeout_s=0)
    assert (sync.policy_version, sync.members) == (4, (1,))
