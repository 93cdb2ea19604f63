"""Test the coordinator's rules: slots, leases, the order of work, the end of a run."""

import dataclasses
import threading

import pytest

from coati_rl.batching.packed_group import PackedGroup
from coati_rl.coordinator.coordinator import Coordinator
from coati_rl.errors import RunError
from coati_rl.work import FinishWork, SaveWork, SyncWork, TrainWork
from tests.unit.coordinator.coordinator_calls import (
    PROBE,
    drive,
    events,
    finish_leases,
    lease_all,
    report_step,
    report_sync,
    work,
)


def test_lockstep_leases_one_rollout_step_and_no_more_until_the_sync(make_coordinator, make_group):
    coordinator = make_coordinator()
    coordinator.add_producer(0, version=0)
    leases = lease_all(coordinator)
    assert len(leases) == 4
    assert finish_leases(coordinator, make_group, leases) == 4
    assert lease_all(coordinator) == ()
    assert isinstance(work(coordinator, 0), TrainWork)
    assert isinstance(work(coordinator, 1), TrainWork)
    assert lease_all(coordinator) == (), "slots of trained groups are held until the weights are out"
    sync = work(coordinator, 2)
    assert sync == SyncWork(index=2, policy_version=2, members=(0,), probe=PROBE)
    assert lease_all(coordinator) == (), "nothing starts while a sync is under way"
    report_sync(coordinator, sync)
    assert work(coordinator, 3) is None
    assert len(lease_all(coordinator)) == 4


def test_a_dead_producers_prompts_are_issued_again_and_its_late_groups_refused(make_coordinator, make_group):
    coordinator = make_coordinator()
    coordinator.add_producer(0, version=0)
    lost = lease_all(coordinator)
    coordinator.add_producer(1, version=0)
    coordinator.remove_producer(0, "killed")
    again = lease_all(coordinator, producer=1)
    assert [lease.prompt for lease in again] == [lease.prompt for lease in lost]
    assert [lease.sampling.seed for lease in again] == [lease.sampling.seed for lease in lost]
    assert finish_leases(coordinator, make_group, lost, producer=0) == 0
    assert finish_leases(coordinator, make_group, again, producer=1) == 4
    assert finish_leases(coordinator, make_group, again, producer=1) == 0, "delivered once"


def test_every_rank_gets_its_own_share_of_the_same_item(make_coordinator, make_group):
    coordinator = make_coordinator(dp=2, train_batch_size=1, train_minibatch_size=1)
    coordinator.add_producer(0, version=0)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    shares = [work(coordinator, 0, rank=rank).batch for rank in (0, 1)]
    assert [share.step for share in shares] == [0, 0]
    assert [len(share.plan) for share in shares] == [1, 1]
    assert shares[0].loss_scale == shares[1].loss_scale == 1 / 4  # 2 prompts x 2 samples over both ranks


def test_mini_batches_stream_and_only_the_last_one_carries_the_denominator(make_coordinator, make_group):
    coordinator = make_coordinator(train_minibatch_size=1)
    coordinator.add_producer(0, version=0)
    leases = lease_all(coordinator)
    finish_leases(coordinator, make_group, leases[:1])
    first = work(coordinator, 0).batch
    assert not first.is_last
    assert work(coordinator, 1) is None, "the second prompt of the step is not there yet"
    finish_leases(coordinator, make_group, leases[1:2])
    second = work(coordinator, 1).batch
    assert second.is_last and second.loss_scale == 1 / 4


def test_a_group_that_nobody_could_score_frees_its_slot_at_once_and_is_counted(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=6)
    coordinator.add_producer(0, version=0)
    leases = lease_all(coordinator)
    coordinator.put(0, [make_group(leases[0], verdict="invalid")])
    assert len(lease_all(coordinator)) == 1
    finish_leases(coordinator, make_group, leases[1:3])
    work(coordinator, 0)
    report_step(coordinator, 0)
    record = events(coordinator, "step")[0]
    assert (record["groups_total"], record["groups_filtered"], record["samples_failed"]) == (3, 1, 2)


def test_a_group_whose_arrays_do_not_belong_together_is_a_failed_prompt_and_takes_nothing_else_with_it(
    make_coordinator, make_group
):
    coordinator = make_coordinator(num_prompts=6)
    coordinator.add_producer(0, version=0)
    leases = lease_all(coordinator)
    good, bad = (PackedGroup.pack(make_group(lease)) for lease in leases[:2])
    assert Coordinator.put(coordinator, 0, [dataclasses.replace(bad, logprobs=bad.logprobs[1:]), good]) == 1
    (failed,) = events(coordinator, "rollout_failed")
    assert failed["uid"] == leases[1].prompt.uid
    assert failed["cause"].startswith("the group of producer 0 is inconsistent: ")


def test_too_many_failures_end_the_run_with_the_numbers(make_coordinator, make_group):
    coordinator = make_coordinator(max_failure_rate=0.75)
    coordinator.add_producer(0, version=0)
    leases = lease_all(coordinator)
    coordinator.fail(0, leases[0].lease_id, "engine refused")
    coordinator.fail(0, leases[1].lease_id, "engine refused")
    with pytest.raises(RunError, match=r"4 samples of one step failed .* 3 are allowed"):
        work(coordinator, 0)


def test_max_steps_ends_the_run_and_leases_no_prompt_that_it_does_not_need(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=100, max_steps=1)
    coordinator.add_producer(0, version=0)
    leases = lease_all(coordinator)
    assert len(leases) == 2
    finish_leases(coordinator, make_group, leases)
    assert isinstance(work(coordinator, 0), TrainWork)
    report_sync(coordinator, work(coordinator, 1))
    save = work(coordinator, 2)
    assert isinstance(save, SaveWork) and save.step == 1
    assert work(coordinator, 3) == FinishWork(step=1)
    assert coordinator.lease(0, max_prompts=1, timeout_s=0).is_finished


def test_prompts_that_do_not_fill_a_step_go_to_the_next_episode_and_the_last_are_dropped(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=3, num_episodes=3)  # 9 prompts, 2 a step: 4 steps, 1 dropped
    coordinator.add_producer(0, version=0)
    assert sum(isinstance(item, TrainWork) for item in drive(coordinator, make_group)) == 4
    assert events(coordinator, "finished")[0]["groups_dropped"] == 1


def test_checkpoints_come_every_interval_and_at_the_end_once(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=8, save_interval=2)
    coordinator.add_producer(0, version=0)
    items = drive(coordinator, make_group)
    assert [item.step for item in items if isinstance(item, SaveWork)] == [2, 4]


def test_groups_of_earlier_steps_are_let_go_also_without_a_ledger(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=24)
    coordinator.add_producer(0, version=0)
    assert len([item for item in drive(coordinator, make_group) if isinstance(item, TrainWork)]) == 12
    assert len(coordinator._state.flow.plans._plans) <= 1 and len(coordinator._decided.notes) <= 2


def test_evaluation_runs_before_training_at_due_syncs_and_at_the_end(make_coordinator, make_group, tmp_path):
    coordinator = make_coordinator(num_prompts=12, eval_prompts=3, eval_interval=3)  # 6 steps, syncs at 2, 4, 6
    coordinator.add_producer(0, version=0)
    first = coordinator.lease(0, max_prompts=3, timeout_s=0).leases
    assert [lease.prompt.purpose for lease in first] == ["eval"] * 3
    assert first[0].sampling.temperature == 0.0 and first[0].group_size == 1
    finish_leases(coordinator, make_group, first)
    drive(coordinator, make_group)
    assert [event["step"] for event in events(coordinator, "evaluation")] == [0, 4, 6]
    assert len((tmp_path / "eval" / "summary.jsonl").read_text().splitlines()) == 3


def test_an_evaluation_prompt_that_fails_is_not_correct_and_the_round_ends(make_coordinator, make_group):
    coordinator = make_coordinator(eval_prompts=2, eval_interval=2)
    coordinator.add_producer(0, version=0)
    leases = {lease.prompt.uid: lease for lease in lease_all(coordinator)}
    coordinator.fail(0, leases["arithmetic-0"].lease_id, "no room")
    finish_leases(coordinator, make_group, [leases["arithmetic-1"]])
    coordinator.flush(timeout_s=10)
    (summary,) = events(coordinator, "evaluation")
    assert (summary["accuracy"], summary["num_prompts"], summary["num_failed"]) == (0.5, 2, 1)


def test_a_group_is_as_old_as_the_sync_before_its_lease_whenever_it_is_handed_in(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=12, n_behind=1)
    coordinator.add_producer(0, version=0)
    first = lease_all(coordinator)
    finish_leases(coordinator, make_group, first[:4])
    assert [type(work(coordinator, index)) for index in (0, 1)] == [TrainWork] * 2
    report_sync(coordinator, work(coordinator, 2))
    assert work(coordinator, 3) is None
    finish_leases(coordinator, make_group, first[4:])
    finish_leases(coordinator, make_group, lease_all(coordinator)[:1], version=2)
    state = coordinator._state
    assert [each.sync_index for each in state.flow.finished] == [0, 0, 0, 0, 1]
    assert state.members.sync_index == 1


def test_the_next_sync_waits_until_the_evaluation_of_these_weights_is_complete(make_coordinator, make_group):
    coordinator = make_coordinator(eval_prompts=1, eval_interval=1)
    coordinator.add_producer(0, version=0)
    evaluation = coordinator.lease(0, max_prompts=1, timeout_s=0).leases
    finish_leases(coordinator, make_group, lease_all(coordinator))
    work(coordinator, 0), work(coordinator, 1)
    assert work(coordinator, 2) is None
    finish_leases(coordinator, make_group, evaluation)
    assert isinstance(work(coordinator, 2), SyncWork)


def test_an_evaluation_whose_weights_are_lost_with_the_last_producer_goes_on_with_newer_ones(
    make_coordinator, make_group
):
    coordinator = make_coordinator(eval_prompts=2, eval_interval=1)
    coordinator.add_producer(0, version=0)
    early, late = coordinator.lease(0, max_prompts=2, timeout_s=0).leases
    finish_leases(coordinator, make_group, [early])
    finish_leases(coordinator, make_group, lease_all(coordinator))
    work(coordinator, 0), work(coordinator, 1)  # the trainers hold version 2 from now on
    coordinator.remove_producer(0, "killed")
    assert work(coordinator, 2) is None
    coordinator.add_producer(1)
    sync = work(coordinator, 2)
    assert sync == SyncWork(index=2, policy_version=2, members=(1,), probe=PROBE)
    report_sync(coordinator, sync)
    (again,) = coordinator.lease(1, max_prompts=1, timeout_s=0).leases
    assert again.prompt == late.prompt
    coordinator.put(1, [make_group(again, producer=1, version=2)])
    (evaluation,) = [event for event in events(coordinator, "evaluation") if event["step"] == 0]
    assert evaluation["policy_versions"] == [0, 2], "and says so"


def test_a_trainer_that_waits_is_woken_by_the_group_that_completes_its_batch(make_coordinator, make_group):
    coordinator = make_coordinator()
    coordinator.add_producer(0, version=0)
    leases = lease_all(coordinator)
    got = []
    waiter = threading.Thread(target=lambda: got.append(coordinator.next_work(0, rank=0, timeout_s=30)))
    waiter.start()
    finish_leases(coordinator, make_group, leases)
    waiter.join(timeout=60.0)
    assert isinstance(got[0], TrainWork)


def test_the_end_is_announced_after_the_last_record_however_late_a_rank_reports_it(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=4)
    coordinator.add_producer(0, version=0)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    work(coordinator, 0), work(coordinator, 1)
    report_sync(coordinator, work(coordinator, 2))
    assert isinstance(work(coordinator, 3), SaveWork) and isinstance(work(coordinator, 4), FinishWork)
    report_step(coordinator, 1)
    assert events(coordinator, "step") == events(coordinator, "finished") == []
    report_step(coordinator, 0)
    coordinator.flush(timeout_s=10)
    kinds = [(event["event"], event["step"]) for event in coordinator.events(0, timeout_s=0)[-3:]]
    assert kinds == [("step", 1), ("step", 2), ("finished", 2)]


def test_events_are_handed_out_once_and_in_order(make_coordinator):
    coordinator = make_coordinator()
    coordinator.add_producer(0, version=0)
    coordinator.add_producer(1, version=0)
    first = coordinator.events(0, timeout_s=0)
    assert [event["producer"] for event in first] == [0, 1]
    coordinator.remove_producer(0, "killed")
    assert [event["event"] for event in coordinator.events(2, timeout_s=0)] == ["producer_lost"]
