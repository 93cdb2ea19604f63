"""Test a coordinator resumed from a checkpoint: no prompt is lost or trained twice, and nothing else differs."""

import pytest

from coati_rl.checkpoint.position import Position
from coati_rl.errors import RunError
from coati_rl.work import FinishWork, SaveWork, SyncWork, TrainWork
from tests.unit.coordinator.driver import Run, position_of, resumed, rollouts, trained


@pytest.mark.parametrize(("save_interval", "saved"), [(1, 2), (2, 2), (3, 4)])
@pytest.mark.parametrize("n_behind", [0, 1])
def test_over_a_run_and_its_resumption_every_prompt_is_trained_once(
    make_coordinator, make_group, make_prompts, tmp_path, save_interval, saved, n_behind
):
    # 16 prompts, 2 a step, K = 2: 8 steps. The first run is killed at its first checkpoint, with leases out and groups
    # finished; the first sync after step 1 and 2 is that of step 2, after step 3 that of step 4.
    sizes = {"num_prompts": 16, "n_behind": n_behind, "save_interval": save_interval}
    first = Run(make_coordinator(**sizes), make_group)
    first.lease()
    first.answer(3)
    save = first.until(SaveWork)
    assert save.step == saved
    done = trained(tmp_path)
    assert [step for step, _ in done] == [step for step in range(1, saved + 1) for _ in range(2)]

    second = Run(make_coordinator(**sizes, **resumed(save, make_prompts(16))), make_group)
    second.until(FinishWork)
    steps, uids = zip(*trained(tmp_path), strict=True)
    assert steps == tuple(step for step in range(1, 9) for _ in range(2))
    assert sorted(uids) == sorted(f"train-{i}.0" for i in range(16))


def test_what_is_lost_and_what_is_leased_since_the_sync_comes_first_in_draw_order_with_its_seeds(
    make_coordinator, make_group, make_prompts
):
    first = Run(make_coordinator(num_prompts=20, n_behind=1, save_interval=2), make_group)
    first.lease()
    before, first_leases = [lease.prompt.uid for lease in first.open], list(first.open)
    first.answer(6)  # four of them will be trained, two are kept
    assert [type(first.next_work()) for _ in range(3)] == [TrainWork, TrainWork, SyncWork]
    assert first.next_work() is None, "two prompts that were leased before the sync are out"
    first.lease()
    since = [lease.prompt.uid for lease in first.open[2:]]
    assert len(since) == 4
    first.coordinator.remove_producer(0, "killed")  # its prompts will be sampled with the checkpoint's weights
    save = first.next_work()
    position = position_of(save)
    assert (position.step, position.num_drawn, list(position.kept)) == (2, 12, before[4:6])
    assert sorted(position.waiting) == sorted(before[6:] + since)

    second = Run(make_coordinator(num_prompts=20, n_behind=1, **resumed(save, make_prompts(20))), make_group)
    assert second.next_work() == SyncWork(index=0, policy_version=2, members=(0,), probe=(1, 2, 3))
    second.lease()
    assert [lease.prompt.uid for lease in second.open] == before[6:] + since, "no more: two slots are the kept groups'"
    seeds = [lease.sampling.seed for lease in second.open]
    assert seeds[:2] == [lease.sampling.seed for lease in first_leases[6:]]


def test_after_a_sync_a_save_waits_for_the_prompts_that_older_weights_sample_and_for_no_other(
    make_coordinator, make_group
):
    run = Run(make_coordinator(num_prompts=20, n_behind=1, save_interval=2), make_group)
    run.lease()
    run.answer(4)
    assert [type(run.next_work()) for _ in range(3)] == [TrainWork, TrainWork, SyncWork]
    assert run.next_work() is None
    run.lease()
    assert len(run.open) == 8, "four of each version"
    run.answer(3)
    assert run.next_work() is None
    run.answer(1)
    assert isinstance(run.next_work(), SaveWork)


@pytest.mark.parametrize(("save_interval", "saved"), [(1, [2, 4, 6, 8]), (3, [4, 6, 8]), (4, [4, 8]), (7, [8])])
def test_checkpoints_are_written_at_the_first_sync_after_each_multiple_of_the_interval(
    make_coordinator, make_group, save_interval, saved
):
    run = Run(make_coordinator(num_prompts=16, save_interval=save_interval), make_group)
    run.until(FinishWork)
    assert [item.step for item in run.items if isinstance(item, SaveWork)] == saved


def test_weights_that_change_while_responses_are_generated_are_not_waited_for(make_coordinator, make_group):
    run = Run(make_coordinator(num_prompts=20, n_behind=1, save_interval=2, inflight_update=True), make_group)
    run.lease()
    run.answer(5)
    assert [type(run.next_work()) for _ in range(3)] == [TrainWork, TrainWork, SyncWork]
    position = position_of(run.next_work())
    assert (len(position.kept), len(position.waiting)) == (1, 3)


def test_kept_groups_are_not_trained_before_the_checkpoints_weights_have_sampled_what_is_theirs(
    make_coordinator, make_group, make_prompts
):
    first = Run(make_coordinator(num_prompts=20, n_behind=1, save_interval=2), make_group)
    first.lease()
    first.answer()
    start = resumed(first.until(SaveWork), make_prompts(20))
    assert len(start["untrained"].finished) == 4 and start["start"].waiting == ()

    second = Run(make_coordinator(num_prompts=20, n_behind=1, **start), make_group)
    assert isinstance(second.next_work(), SyncWork)
    second.lease(3)
    assert second.next_work() is None, "a slot is free, and its prompt would meet the step's weights"
    second.lease()
    assert len(second.open) == 4
    assert [type(second.next_work()) for _ in range(3)] == [TrainWork, TrainWork, SyncWork]


def test_kept_groups_keep_their_deadlines(make_coordinator, make_group, make_prompts):
    # n_behind 1, K = 1: what was leased before the checkpoint's sync is trained in the next step, however late it is
    # among what comes in.
    sizes = {"num_prompts": 20, "n_behind": 1, "sync_period": 1, "save_interval": 1, "train_minibatch_size": 1}
    first = Run(make_coordinator(**sizes), make_group)
    first.lease()
    old = [lease.prompt.uid for lease in first.open[2:]]
    first.answer()
    start = resumed(first.until(SaveWork), make_prompts(20))
    assert [(each.group.prompt.uid, each.sync_index) for each in start["untrained"].finished] == [
        (uid, -1) for uid in old
    ]
    second = Run(make_coordinator(**sizes, **start), make_group)
    second.next_work()
    second.lease()
    second.answer()
    second.until(SyncWork)
    (record,) = second.events("step")
    assert (record["staleness_mean"], record["staleness_max"]) == (1.0, 1)


def test_a_producer_gets_the_checkpoints_weights_before_its_first_prompt(make_coordinator, make_group):
    run = Run(make_coordinator(start=Position(step=2, num_drawn=4)), make_group)
    run.lease()
    assert run.open == []
    assert run.next_work() == SyncWork(index=0, policy_version=2, members=(0,), probe=(1, 2, 3))
    run.lease()
    assert len(run.open) == 4


def test_a_run_resumed_between_two_syncs_has_its_next_one_in_its_old_place(make_coordinator, make_group):
    # K = 2, step 1: one step of the period is left, and its two slots.
    run = Run(make_coordinator(start=Position(step=1, num_drawn=2)), make_group)
    run.next_work()
    run.lease()
    assert len(run.open) == 2
    run.answer()
    assert [type(run.next_work()) for _ in range(2)] == [TrainWork, SyncWork]
    assert run.version == 2


def test_steps_metrics_and_the_learning_rate_go_on(make_coordinator, make_group):
    start = Position(step=2, num_drawn=4, time_s=100.0)
    run = Run(make_coordinator(num_prompts=8, start=start), make_group)
    run.until(FinishWork)
    batches = [item.batch for item in run.items if isinstance(item, TrainWork)]
    assert [(batch.step, batch.learning_rate_progress) for batch in batches] == [(2, 4 / 8), (3, 6 / 8)]
    records = run.events("step")
    assert [(record["step"], record["policy_version"]) for record in records] == [(3, 3), (4, 4)]
    assert all(100.0 < record["time_s"] < 160.0 for record in records)
    assert [item.step for item in run.items if isinstance(item, SaveWork)] == [4], "the old one is not written again"


def test_max_steps_counts_the_steps_before_the_checkpoint(make_coordinator, make_group):
    run = Run(make_coordinator(num_prompts=100, max_steps=3, start=Position(step=2, num_drawn=4)), make_group)
    assert run.until(FinishWork).step == 3
    assert sum(isinstance(item, TrainWork) for item in run.items) == 1


def test_a_run_that_was_over_goes_on_with_more_steps_and_what_it_had_left_over(
    make_coordinator, make_group, make_prompts, tmp_path
):
    first = Run(make_coordinator(num_prompts=9, max_steps=3), make_group)
    start = resumed(first.until(SaveWork), make_prompts(9))
    second = Run(make_coordinator(num_prompts=9, **start), make_group)
    assert second.until(FinishWork).step == 4
    assert len({uid for _, uid in trained(tmp_path)}) == len(trained(tmp_path)) == 8
    assert second.events("finished")[0]["groups_dropped"] == 1


def test_groups_of_a_step_that_was_never_full_are_not_counted_as_trained(make_coordinator, make_group):
    first = Run(make_coordinator(num_prompts=3, train_minibatch_size=1), make_group)
    position = position_of(first.until(SaveWork))
    assert (position.step, position.num_drawn, position.waiting, len(position.kept)) == (1, 3, (), 1)


def test_groups_dropped_since_the_last_step_count_towards_the_next_record(
    make_coordinator, make_group, make_prompts, tmp_path
):
    sizes = {"num_prompts": 20, "n_behind": 1, "save_interval": 2}
    first = Run(make_coordinator(**sizes), make_group)
    first.lease()
    first.answer(4)
    assert [type(first.next_work()) for _ in range(3)] == [TrainWork, TrainWork, SyncWork]
    first.version = 0  # which the rest was sampled with
    first.answer(1, verdict="invalid")
    first.answer(3)
    save = first.next_work()
    position = position_of(save)
    assert (position.groups_filtered, position.samples_failed, len(position.kept)) == (1, 2, 3)

    second = Run(make_coordinator(**sizes, **resumed(save, make_prompts(20))), make_group)
    assert isinstance(second.next_work(), SyncWork)
    second.lease()
    assert isinstance(second.next_work(), TrainWork)
    (record,) = second.events("step")
    assert (record["groups_total"], record["groups_filtered"], record["samples_failed"]) == (3, 1, 2)
    assert (record["samples_invalid"], record["staleness_max"]) == (2, 1)
    assert [line["is_trained"] for line in rollouts(tmp_path) if line["step"] == 3] == [True] * 4 + [False] * 2


def test_failures_before_the_checkpoint_count_towards_what_is_allowed_in_a_step(make_coordinator):
    start = Position(step=1, num_drawn=3, groups_filtered=1, samples_failed=2)
    with pytest.raises(RunError, match="2 samples of one step failed"):
        make_coordinator(max_failure_rate=0.25, start=start).next_work(0, rank=0, timeout_s=0)


def test_an_evaluation_that_was_complete_is_not_repeated(make_coordinator, make_group):
    sizes = {"num_prompts": 8, "eval_prompts": 1, "eval_interval": 2}
    start = Position(step=2, num_drawn=4, last_evaluated=2)
    run = Run(make_coordinator(**sizes, start=start), make_group)
    run.until(FinishWork)
    assert [event["step"] for event in run.events("evaluation")] == [4]


def test_an_evaluation_that_was_under_way_is_repeated_unless_it_was_completed_later(
    make_coordinator, make_group, tmp_path
):
    sizes = {"num_prompts": 8, "eval_prompts": 1, "eval_interval": 2}
    start = Position(step=2, num_drawn=4, last_evaluated=0)
    run = Run(make_coordinator(**sizes, start=start), make_group)
    run.until(FinishWork)
    assert [event["step"] for event in run.events("evaluation")] == [2, 4]
    # The files know of the evaluations at 2 and 4 now; a resumption at 2 trusts the first and forgets the second.
    again = Run(make_coordinator(**sizes, start=start), make_group)
    again.until(FinishWork)
    assert [event["step"] for event in again.events("evaluation")] == [4]


def test_the_position_of_a_checkpoint_knows_only_complete_evaluations(make_coordinator, make_group):
    sizes = {"num_prompts": 8, "eval_prompts": 1, "eval_interval": 2, "save_interval": 2}
    run = Run(make_coordinator(**sizes), make_group)
    save = run.until(SaveWork, step=2)
    assert position_of(save).last_evaluated == 0, "that of step 2 has just begun"
    assert position_of(run.until(SaveWork, step=4)).last_evaluated == 2
