"""Test that a coordinator that is killed at any call is replaced by one that loses nothing and trains nothing twice."""

import json
import os
import shutil
from pathlib import Path

import pytest

from coati_rl.checkpoint.ledger_files import segments_in
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.coordinator.take_over import read_left_state
from coati_rl.errors import RunError
from tests.unit.coordinator.coordinator_calls import lease_all, report_sync, work
from tests.unit.coordinator.driver import trained
from tests.unit.coordinator.replaced_coordinators import ReplacedCoordinators
from tests.unit.coordinator.test_ledger import no_fsync

__all__ = ["no_fsync"]  # a fixture

NUM_PROMPTS, FAILS = 24, ("train-3.0", "train-11.0")
FOURS = {"train_batch_size": 4, "train_minibatch_size": 4}
TWO_RANKS = {"dp": 2, "train_batch_size": 1, "train_minibatch_size": 1}
KINDS = {
    "lockstep": {"n_behind": 0, "sync_period": 1, "save_interval": 1},
    "lockstep, two steps a sync": {"n_behind": 0, "sync_period": 2, "save_interval": 4},
    "ahead": {"n_behind": 1, "sync_period": 1, "save_interval": 2, "eval_prompts": 3, "eval_interval": 2},
    "in mini-batches": {"n_behind": 1, "sync_period": 2, "dp": 2, "train_batch_size": 2, "train_minibatch_size": 1},
    "replaced": {"n_behind": 1, "sync_period": 2, "save_interval": 2, "dynamic_batching": True, "max_empty_groups": 99},
    "several updates": {"n_behind": 0, "sync_period": 4, "updates_per_batch": 2, "save_interval": 4},
}


@pytest.fixture
def killed(no_fsync, make_coordinator, make_group, tmp_path):
    def run(kind, *, seed, kills, **options):
        sizes = {**TWO_RANKS, "num_prompts": NUM_PROMPTS, **KINDS[kind], **options}
        directory = tmp_path / f"{kind}-{seed}-{kills}"
        run = ReplacedCoordinators(
            make_coordinator, make_group, directory, seed=f"{kind}/{seed}", kills=kills, fails=FAILS, **sizes
        )
        run.go()
        return run

    return run


def assert_nothing_lost(run, kind):
    done = [uid for _, uid in trained(run.files)]
    updates = KINDS[kind].get("updates_per_batch", 1)
    size = KINDS[kind].get("dp", 2) * KINDS[kind].get("train_batch_size", 1)
    num_trained = (NUM_PROMPTS - len(FAILS)) // size * size
    assert len(done) == len({*done}) == num_trained
    assert {*done} <= {f"train-{number}.0" for number in range(NUM_PROMPTS)} - {*FAILS}
    steps = [event for event in run.events if event["event"] == "step"]
    assert [step["step"] for step in steps] == [*range(1, num_trained // size * updates + 1)]
    assert max(step["staleness_max"] for step in steps) <= KINDS[kind]["n_behind"]
    assert all(step["loss"] == (step["step"] - 1) / 8 for step in steps)
    lines = [json.loads(line) for path in sorted((run.files / "rollouts").iterdir()) for line in path.open()]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert len({(line["uid"], line["sample"]) for line in lines}) == len(lines)
    assert all(line["rollout_logprobs"][0] in run.offered[line["uid"]] for line in lines)
    if "eval_interval" in KINDS[kind]:
        summary = [json.loads(line) for line in (run.files / "eval" / "summary.jsonl").open()]
        assert [line["step"] for line in summary] == [0, 2, 4, 6, 8, 10, 11]
        assert [line["step"] for line in summary] == [e["step"] for e in run.events if e["event"] == "evaluation"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_coordinator_that_is_killed_at_any_call_is_replaced_and_nothing_is_lost(killed, kind):
    run = killed(kind, seed=0, kills=12, loses=kind == "ahead")
    assert run.num_kills >= 4
    assert_nothing_lost(run, kind)


@pytest.mark.full
def test_in_lockstep_every_batch_is_the_undisturbed_runs(killed):
    undisturbed, disturbed = killed("lockstep", seed=0, kills=0), killed("lockstep", seed=1, kills=12)
    assert undisturbed.num_kills == 0 and disturbed.num_kills >= 4
    assert by_step(disturbed) == by_step(undisturbed)


def by_step(run):
    """Each rank's part of each mini-batch, whatever its number in the list of work."""
    return {(step, rank): content for (step, rank, _), content in run.batches.items()}


@pytest.fixture
def life(make_coordinator, tmp_path):
    """Number of a life -> a coordinator, from 1 on one that takes over from the files that the one before has left."""

    def begin(number):
        directory = tmp_path / f"life-{number}"
        left = None
        if number:
            shutil.copytree(tmp_path / f"life-{number - 1}" / "ledger", directory / "ledger")
            left = read_left_state(directory / "ledger")
        return make_coordinator(directory=directory, ledger=LedgerWriter(directory / "ledger", batch_s=60.0), left=left)

    return begin


def test_takeovers_count_though_each_coordinator_ends_before_it_has_done_anything(life):
    life(0).add_producer(0)
    for number in (1, 2, 3):
        life(number)
    with pytest.raises(RunError, match="the coordinator has ended 4 times without an optimizer step"):
        life(4)


def test_a_producer_that_is_added_again_as_the_coordinator_has_died_gets_prompts(life):
    life(0).add_producer(0)  # the answer is lost
    second = life(1)
    second.add_producer(0)
    report_sync(second, work(second, 0))
    assert lease_all(second)


def test_what_a_dead_coordinator_has_written_is_durable_before_another_segment_follows(life, tmp_path, monkeypatch):
    life(0).flush(timeout_s=10)
    with segments_in(tmp_path / "life-0" / "ledger")[0].path.open("ab") as file:
        file.write(b"torn")
    flushed, real = [], os.fsync

    def note(descriptor):
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    life(1)
    assert flushed[:2] == ["segment-000001.ledger", ".segment-000002.ledger.partial"]
    assert read_left_state(tmp_path / "life-1" / "ledger") is not None, "what was torn is cut off"


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_coordinators_are_killed_and_nothing_is_lost(killed, kind):
    expected = by_step(killed(kind, seed=0, kills=0)) if kind == "lockstep" else None
    num_kills = seed = 0
    while num_kills < 170:  # of each of six kinds
        seed += 1
        run = killed(kind, seed=seed, kills=20, loses=seed % 2 == 0)
        num_kills += run.num_kills
        assert_nothing_lost(run, kind)
        assert expected is None or by_step(run) == expected
