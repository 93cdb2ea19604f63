"""Test that a run that is killed at any moment loses no prompt, trains none twice and samples no finished one again."""

import json
import os
from functools import partial

import pytest

from coati_rl.checkpoint.ledger_files import read_ledger
from coati_rl.checkpoint.ledger_frames import Record
from coati_rl.checkpoint.ledger_resume import LEASED, finished_record, recover, start_records
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.checkpoint.position import Position
from coati_rl.errors import RunError
from coati_rl.reading.prompt_source import DatasetPrompts
from coati_rl.work import FinishWork, SaveWork, SyncWork, TrainWork
from tests.unit.coordinator.driver import Run, position_of, resumed, rollouts, trained
from tests.unit.coordinator.killed_runs import KilledRun

LOCKSTEP = {"n_behind": 0, "sync_period": 1, "save_interval": 1}
FOURS = {"train_batch_size": 4, "train_minibatch_size": 4}
SIZES = {
    "lockstep": LOCKSTEP,
    "a checkpoint every second step": {"n_behind": 0, "sync_period": 2, "save_interval": 4},
    "ahead": {"n_behind": 1, "sync_period": 1, "save_interval": 2},
    "ahead, in mini-batches": {"n_behind": 2, "sync_period": 2, "save_interval": 2, "train_minibatch_size": 1},
    "replaced": {"n_behind": 1, "sync_period": 2, "save_interval": 2, "dynamic_batching": True, "max_empty_groups": 99},
}
NUM_PROMPTS, FAILS = 24, ("train-3.0", "train-11.0")


@pytest.fixture
def no_fsync(monkeypatch):
    """A killed process leaves what it has written: the disk itself is not under test, and takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def killed(no_fsync, make_coordinator, make_group, make_prompts, tmp_path):
    def run(*, kills, **options):
        directory = {"num_prompts": NUM_PROMPTS, "fails": FAILS} | options
        found = KilledRun(make_coordinator, make_group, make_prompts, tmp_path, **directory)
        found.go(kills=kills)
        return found

    return run


def trained_in_steps(tmp_path):
    """The uids of each step, sorted as a mini-batch is."""
    steps = {}
    for line in rollouts(tmp_path):
        if line["is_trained"] and line["sample"] == 0:
            steps.setdefault(line["step"], []).append(line["uid"])
    return steps


def assert_nothing_lost(run, tmp_path, n_behind):
    done = [uid for _, uid in trained(tmp_path)]
    # 22 prompts can be: 11 steps of 2.
    assert sorted(done) == sorted(f"train-{i}.0" for i in range(NUM_PROMPTS) if f"train-{i}.0" not in FAILS)
    assert run.sampled_again == []
    assert [record["step"] for record in run.records] == [*range(1, 12)]
    assert max(record["staleness_max"] for record in run.records) <= n_behind
    tags = {line["uid"]: line["rollout_logprobs"][0] for line in rollouts(tmp_path) if line["is_trained"]}
    assert tags == {uid: run.tags[uid] for uid in tags}, "the samples that were delivered"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", SIZES)
def test_killed_at_any_call_a_run_loses_nothing_and_samples_nothing_again(killed, tmp_path, kind, seed):
    sizes = SIZES[kind]
    run = killed(seed=f"{kind}/{seed}", kills=8, loses=seed == 1, **sizes)
    assert run.num_kills >= 4
    assert_nothing_lost(run, tmp_path, sizes["n_behind"])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3, 43))
@pytest.mark.parametrize("kind", SIZES)
def test_killed_at_a_thousand_points_a_run_loses_nothing(killed, tmp_path, kind, seed):
    sizes = SIZES[kind]
    run = killed(seed=f"{kind}/{seed}", kills=8, loses=seed % 2 == 0, **sizes)
    assert_nothing_lost(run, tmp_path, sizes["n_behind"])


@pytest.mark.full
def test_in_lockstep_each_step_trains_the_prompts_of_the_undisturbed_run(
    no_fsync, make_coordinator, make_group, make_prompts, tmp_path
):
    orders, num_taken_up = [], 0
    for kills in (0, 8, 8, 8):
        directory = tmp_path / str(len(orders))
        options = {"num_prompts": NUM_PROMPTS, "fails": FAILS, "seed": len(orders), **LOCKSTEP, **FOURS}
        run = KilledRun(partial(make_coordinator, directory=directory), make_group, make_prompts, directory, **options)
        run.go(kills=kills)
        orders.append(trained_in_steps(directory))
        num_taken_up += run.num_taken_up
    assert num_taken_up >= 10
    assert orders[1:] == orders[:1] * 3


def find(make_prompts, number=20):
    return DatasetPrompts(make_prompts(number), num_episodes=1, seed=0).find


def test_groups_that_later_steps_have_trained_are_taken_up_and_those_of_later_weights_are_not(
    make_coordinator, make_group, make_prompts, tmp_path
):
    sizes = {"num_prompts": 20, "n_behind": 1, "sync_period": 1, "save_interval": 2}
    run = Run(make_coordinator(**sizes, ledger=LedgerWriter(tmp_path / "ledger")), make_group)
    save = run.until(SaveWork)
    assert save.step == 2
    run.coordinator.report_saved(2, "")
    run.lease()
    here = [lease.prompt.uid for lease in run.open]
    run.answer()
    kept = position_of(save).kept
    run.until(SyncWork)  # to version 3; a step is trained
    run.next_work()
    run.lease()
    later = [lease.prompt.uid for lease in run.open]
    run.answer()
    run.coordinator.flush(timeout_s=10)
    recovered = recover(tmp_path / "ledger", position_of(save), find(make_prompts), n_behind=1)
    assert [each.group.prompt.uid for each in recovered.finished] == here and here and later
    assert {each.sync_index for each in recovered.finished} == {0}
    assert {*kept, *here}.isdisjoint(later) and {*later}.isdisjoint(recovered.waiting)
    assert recovered.num_drawn == position_of(save).num_drawn + len(here)


def test_a_group_with_a_token_of_later_weights_is_sampled_again_though_it_was_leased_before_their_sync_was_complete(
    group_of, make_prompts, tmp_path
):
    position = Position(step=2, num_drawn=4, waiting=("train-0.0", "train-1.0", "train-2.0"))
    writer = LedgerWriter(tmp_path / "ledger")
    writer.begin(start_records(position, None), is_start=True)
    for number, (version, sync_index) in enumerate(((2, 0), (3, 0), (1, -2))):
        uid = f"train-{number}.0"
        writer.append(Record(kind=LEASED, fields={"uid": uid, "lease": number, "number": None, "sync": 0}).to_bytes)
        group = group_of([(1.0, 2), (0.0, 3)], uid=uid, version=version)
        writer.append(finished_record(group, sync_index, {version: sync_index}, {version: "i"}))
    writer.flush(timeout_s=10)
    recovered = recover(tmp_path / "ledger", position, find(make_prompts), n_behind=1)
    assert [each.group.prompt.uid for each in recovered.finished] == ["train-0.0"]
    assert recovered.waiting == ("train-1.0", "train-2.0"), "the last one was leased two syncs before"
    assert (recovered.num_drawn, recovered.lease_ids["train-1.0"]) == (4, 1)
    assert (recovered.sync_index_of, recovered.identities) == ({2: 0}, {2: "i"})


def test_nothing_is_taken_up_for_a_checkpoint_that_the_ledger_does_not_reach_back_to(
    make_coordinator, make_group, make_prompts, tmp_path
):
    run = Run(make_coordinator(num_prompts=20, save_interval=2, ledger=LedgerWriter(tmp_path / "ledger")), make_group)
    first = run.until(SaveWork)
    run.coordinator.report_saved(first.step, "")
    second = run.until(SaveWork)
    run.coordinator.report_saved(second.step, "")
    run.coordinator.flush(timeout_s=10)
    assert recover(tmp_path / "ledger", position_of(first), find(make_prompts), n_behind=0) is None
    assert recover(tmp_path / "ledger", position_of(second), find(make_prompts), n_behind=0).finished == ()
    assert recover(tmp_path / "none", position_of(second), find(make_prompts), n_behind=0) is None


def test_the_ledger_of_another_run_is_an_error(make_coordinator, make_prompts, tmp_path):
    make_coordinator(ledger=LedgerWriter(tmp_path / "ledger")).flush(timeout_s=10)
    with pytest.raises(ValueError, match="ledger is not of this checkpoint: its prompts at step 0 are others"):
        recover(tmp_path / "ledger", Position(num_drawn=2), find(make_prompts), n_behind=0)


def test_every_decision_about_training_is_in_the_ledger(make_coordinator, make_group, tmp_path):
    ledger = LedgerWriter(tmp_path / "ledger")
    run = Run(make_coordinator(num_prompts=6, eval_prompts=1, eval_interval=2, ledger=ledger), make_group)
    run.lease(3)
    run.coordinator.fail(0, run.open.pop(1).lease_id, "too long")
    run.coordinator.remove_producer(0, "killed")
    run.coordinator.add_producer(0, version=0)
    run.open = []
    run.until(FinishWork)
    run.coordinator.flush(timeout_s=10)
    kinds = [each.kind for each in read_ledger(tmp_path / "ledger") if each.kind != "state"]  # after each batch
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "start": 1,
        "leased": 7,  # six prompts, of which the first two twice, and the third failed
        "failed": 1,
        "lost": 1,
        "finished": 5,
        "in_step": 2,
        "settled": 2,
        "version": 1,
        "checkpoint": 1,
        "named": 1,  # the group that no step has trained when the checkpoint is taken
    }


def test_a_step_waits_for_its_groups_to_be_durable_and_for_nothing_else(make_coordinator, make_group, tmp_path):
    ledger = LedgerWriter(tmp_path / "ledger", batch_s=60.0)
    run = Run(make_coordinator(num_prompts=8, train_minibatch_size=2, ledger=ledger), make_group)
    run.coordinator.add_producer(1, version=0)
    ledger.flush(timeout_s=10)
    before = ledger.num_durable
    run.lease()
    run.answer(2)
    assert ledger.num_durable == before < ledger.num_appended, "leases and groups were taken without a wait"
    finished = ledger.num_appended
    item = run.coordinator.next_work(0, rank=0, timeout_s=0)
    assert isinstance(item, SyncWork | TrainWork)
    assert ledger.num_durable >= finished


def test_a_ledger_that_cannot_be_written_ends_the_run_with_path_cause_and_remedy(
    make_coordinator, make_group, tmp_path
):
    (tmp_path / "ledger").write_text("a file")
    with pytest.raises(RunError, match=r"ledger.* cannot be written: "):
        run = Run(make_coordinator(num_prompts=8, ledger=LedgerWriter(tmp_path / "ledger", batch_s=0.0)), make_group)
        run.until(FinishWork)


def test_failures_of_several_steps_that_are_taken_up_at_once_do_not_stop_a_run(
    make_coordinator, make_group, make_prompts, tmp_path
):
    # K = 2 steps of 2 prompts x 2 samples; 2 failed samples of a step are allowed, and each step has that many.
    sizes = {"num_prompts": 20, "save_interval": 2, "max_failure_rate": 0.5}
    run = Run(make_coordinator(**sizes, ledger=LedgerWriter(tmp_path / "ledger")), make_group)
    save = run.until(SaveWork)
    run.coordinator.report_saved(save.step, "")
    run.lease()
    run.answer(1, verdict="invalid")
    run.answer(1)
    assert isinstance(run.next_work(), TrainWork | None)
    run.answer(1, verdict="invalid")
    run.coordinator.flush(timeout_s=10)
    recovered = recover(tmp_path / "ledger", position_of(save), find(make_prompts), n_behind=0)
    assert len(recovered.finished) == 3
    again = Run(make_coordinator(**sizes, **resumed(save, make_prompts(20)), recovered=recovered), make_group)
    assert again.until(FinishWork).step == 9


def test_a_resumed_run_with_all_groups_of_its_step_answers_its_evaluation_with_the_checkpoints_weights(
    make_coordinator, make_group, make_prompts, tmp_path
):
    sizes = {"num_prompts": 20, "save_interval": 2, "eval_prompts": 1, "eval_interval": 2}
    run = Run(make_coordinator(**sizes, ledger=LedgerWriter(tmp_path / "ledger")), make_group)
    save = run.until(SaveWork)
    run.coordinator.report_saved(save.step, "")
    run.lease()
    run.open = [lease for lease in run.open if lease.prompt.purpose == "train"]
    run.answer()
    run.coordinator.flush(timeout_s=10)
    recovered = recover(tmp_path / "ledger", position_of(save), find(make_prompts), n_behind=0)
    assert len(recovered.finished) == 4
    again = make_coordinator(**sizes, **resumed(save, make_prompts(20)), recovered=recovered)
    wait = again.next_work(0, rank=0, timeout_s=0)
    assert wait.reason == "waiting for the first producer: its engine is loading, for the evaluation of step 2"
    driven = Run(again, make_group)
    driven.until(FinishWork)
    (first, *_) = driven.events("evaluation")
    assert (first["step"], first["policy_versions"]) == (2, [2])
    assert json.loads((tmp_path / "eval" / "summary.jsonl").read_text().splitlines()[-1])["step"] == 10


def test_a_prompt_that_is_sampled_again_has_its_place_before_groups_that_were_leased_later(
    make_coordinator, make_group, make_prompts, tmp_path
):
    sizes = {"num_prompts": 20, "save_interval": 2}  # two steps of two prompts to a weight sync
    run = Run(make_coordinator(**sizes, ledger=LedgerWriter(tmp_path / "ledger")), make_group)
    save = run.until(SaveWork)
    run.coordinator.report_saved(save.step, "")
    run.lease()
    here = [lease.prompt.uid for lease in run.open]
    run.open.pop(1)
    run.answer()
    run.coordinator.flush(timeout_s=10)
    recovered = recover(tmp_path / "ledger", position_of(save), find(make_prompts), n_behind=0)
    again = Run(make_coordinator(**sizes, **resumed(save, make_prompts(20)), recovered=recovered), make_group)
    assert isinstance(again.next_work(), SyncWork)
    again.lease()
    assert [lease.prompt.uid for lease in again.open] == here[1:2]
    again.answer()
    assert [type(again.next_work()) for _ in range(2)] == [TrainWork, TrainWork]
    again.coordinator.flush(timeout_s=10)
    assert [trained_in_steps(tmp_path)[step] for step in (3, 4)] == [sorted(here[:2]), sorted(here[2:])]
