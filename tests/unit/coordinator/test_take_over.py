"""Test that a coordinator that is killed at any call is replaced by one that loses nothing and trains nothing twice."""

import json

import pytest

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


@pytest.mark.parametrize("kind", KINDS)
def test_a_coordinator_that_is_killed_at_any_call_is_replaced_and_nothing_is_lost(killed, kind):
    run = killed(kind, seed=0, kills=12, loses=kind == "ahead")
    assert run.num_kills >= 4
    assert_nothing_lost(run, kind)


def test_in_lockstep_every_batch_is_the_undisturbed_runs(killed):
    undisturbed, disturbed = killed("lockstep", seed=0, kills=0), killed("lockstep", seed=1, kills=12)
    assert undisturbed.num_kills == 0 and disturbed.num_kills >= 4
    assert by_step(disturbed) == by_step(undisturbed)


def by_step(run):
    """Each rank's part of each mini-batch, whatever its number in the list of work."""
    return {(step, rank): content for (step, rank, _), content in run.batches.items()}


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
